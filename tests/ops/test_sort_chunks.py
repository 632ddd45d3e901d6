"""sort_chunks against plain loops; gradients, hazards, compilation, errors."""

import itertools

import numpy as np
import pytest
import torch
from cases import MOVED, assert_same_bits, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tokenyard
from tokenyard import ArgumentError

SORT_CHUNKS = [tokenyard.sort_chunks, tokenyard.sort_chunks_reference]

# split sizes, order, rows past the last chunk
CHUNKS = [
    ([2, 0, 3, 1], [2, 1, 3, 0], 0),
    ([0, 0, 4], [1, 2, 0], 2),
    ([5], [0], 1),
    ([0, 0, 0], [2, 0, 1], 3),
    ([0, 0], [1, 0], 0),
    ([], [], 4),
    ([], [], 0),
    ([1, 1, 1, 1, 1, 1], [3, 5, 0, 1, 4, 2], 0),
]


def literal_source(sizes: list[int], order: list[int], tail: int) -> list[int]:
    """The row that each row of the result comes from."""
    chunks, start = [], 0
    for size in sizes:
        chunks.append(list(range(start, start + size)))
        start += size
    source = [row for chunk in order for row in chunks[chunk]]
    return source + list(range(start, start + tail))


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    sizes = draw(st.lists(st.integers(0, 5), max_size=7))
    order = draw(st.permutations(range(len(sizes))))
    return sizes, list(order), draw(st.integers(0, 4))


@settings(max_examples=100)
@given(chunk_lists())
def test_equals_the_loops(chunks: tuple[list[int], list[int], int]) -> None:
    sizes, order, tail = chunks
    source = literal_source(sizes, order, tail)
    x_NH = wide(len(source), 3, dtype=torch.float32).requires_grad_()
    want_NH = torch.zeros(len(source), 3)
    for row, origin in enumerate(source):
        want_NH[row] = x_NH[origin].detach()
    out_NH = tokenyard.sort_chunks(x_NH, sizes, order)
    assert_same_bits(out_NH, want_NH)
    sizes_C = torch.tensor(sizes, dtype=torch.int64)
    order_C = torch.tensor(order, dtype=torch.int64)
    assert_same_bits(tokenyard.sort_chunks_reference(x_NH, sizes_C, order_C), want_NH)
    grad_NH = wide(len(source), 3, dtype=torch.float32)
    (d_x_NH,) = torch.autograd.grad(out_NH, x_NH, grad_NH)
    want_d_x_NH = torch.zeros(len(source), 3)
    for row, origin in enumerate(source):
        want_d_x_NH[origin] = grad_NH[row]
    assert_same_bits(d_x_NH, want_d_x_NH)


def test_every_order_of_three_chunks() -> None:
    x_N = torch.arange(7)
    for order in itertools.permutations(range(3)):
        out_N = tokenyard.sort_chunks(x_N, [3, 0, 4], list(order))
        assert out_N.tolist() == literal_source([3, 0, 4], list(order), 0)


def test_rank_major_to_expert_major_and_back() -> None:
    """Two ranks of three experts: chunk rank * 3 + expert goes to expert * 2 + rank."""
    sizes = [1, 2, 0, 3, 1, 2]
    order = [rank * 3 + expert for expert in range(3) for rank in range(2)]
    labels_N = torch.tensor([c for c, size in enumerate(sizes) for _ in range(size)])
    by_expert_N = tokenyard.sort_chunks(labels_N, sizes, order)
    assert [chunk % 3 for chunk in by_expert_N.tolist()] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    back = [order.index(chunk) for chunk in range(6)]
    sizes_by_expert = [sizes[chunk] for chunk in order]
    assert torch.equal(tokenyard.sort_chunks(by_expert_N, sizes_by_expert, back), labels_N)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (20,), (3, 2)], ids=str)
def test_every_dtype_and_rank(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(6, *shape) * 50).to(dtype)
    want = torch.stack([x[row] for row in [2, 3, 4, 0, 1, 5]])
    for index_dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        sizes_C = torch.tensor([2, 0, 3, 1], dtype=index_dtype)
        order_C = torch.tensor([2, 1, 0, 3], dtype=index_dtype)
        for sort_chunks in SORT_CHUNKS:
            assert_same_bits(sort_chunks(x, sizes_C, order_C), want)


def test_sizes_beyond_the_range_of_their_sum() -> None:
    """Sums of uint8 and int8 sizes do not wrap."""
    for dtype, size in ((torch.uint8, 200), (torch.int8, 100)):
        sizes_C = torch.tensor([size, size, size], dtype=dtype)
        x_N = torch.arange(3 * size, dtype=torch.float64).requires_grad_()
        out_N = tokenyard.sort_chunks(x_N, sizes_C, torch.tensor([2, 0, 1], dtype=dtype))
        assert out_N.tolist() == literal_source([size] * 3, [2, 0, 1], 0)
        grad_N = torch.arange(3 * size, dtype=torch.float64)
        out_N.backward(grad_N)
        assert x_N.grad is not None
        assert x_N.grad.tolist() == literal_source([size] * 3, [1, 2, 0], 0)


@pytest.mark.parametrize("sizes, order, tail", CHUNKS)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradcheck(sizes: list[int], order: list[int], tail: int) -> None:
    num_rows = sum(sizes) + tail
    x_NH = torch.randn(num_rows, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tokenyard.sort_chunks(x, sizes, order), x_NH)
    x_N = torch.randn(num_rows, dtype=torch.float64, requires_grad=True)
    tokenyard.sort_chunks(x_N, sizes, order).sum().backward()
    assert x_N.grad is not None and torch.equal(x_N.grad, torch.ones_like(x_N))


def test_strides() -> None:
    wide_NH = torch.randn(6, 12)
    for x_NH in (
        wide_NH[:, 4:8],
        wide_NH[:, ::5],
        torch.randn(3, 6).t(),
        wide_NH[:, :1].expand(6, 4),
    ):
        x_NH = x_NH.detach().requires_grad_()
        out_NH = tokenyard.sort_chunks(x_NH, [2, 0, 3], [2, 1, 0])
        assert_same_bits(out_NH, torch.stack([x_NH.detach()[r] for r in [2, 3, 4, 0, 1, 5]]))
        grad_NH = torch.randn(out_NH.shape[1], 6).t()
        (d_x_NH,) = torch.autograd.grad(out_NH, x_NH, grad_NH)
        assert_same_bits(d_x_NH, torch.stack([grad_NH[r] for r in [3, 4, 0, 1, 2, 5]]))


@pytest.mark.parametrize("sizes, order, tail", [CHUNKS[0], CHUNKS[1], CHUNKS[5]])
def test_opcheck(sizes: list[int], order: list[int], tail: int) -> None:
    x_NH = torch.randn(sum(sizes) + tail, 2, requires_grad=True)
    sizes_C = torch.tensor(sizes, dtype=torch.int32)
    order_C = torch.tensor(order, dtype=torch.int64)
    torch.library.opcheck(torch.ops.tokenyard.sort_chunks.default, (x_NH, sizes_C, order_C))
    arguments = (x_NH.detach(), sizes_C, order_C)
    torch.library.opcheck(torch.ops.tokenyard.sort_chunks_backward.default, arguments)


def test_compile_once_for_every_number_of_rows() -> None:
    def function(x_NH: Tensor, sizes_C: Tensor, order_C: Tensor) -> Tensor:
        return tokenyard.sort_chunks(x_NH, sizes_C, order_C)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ([2, 0, 3], [4, 1, 2], [0, 6, 5]):
        x_NH = torch.randn(sum(sizes) + 1, 3, requires_grad=True)
        chunks = torch.tensor(sizes), torch.tensor([2, 0, 1])
        stance = "default" if sizes == [2, 0, 3] else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            out_NH = compiled(x_NH, *chunks)
            grad_NH = torch.randn_like(out_NH)
            (d_x_NH,) = torch.autograd.grad(out_NH, x_NH, grad_NH)
        want_NH = function(x_NH, *chunks)
        assert_same_bits(out_NH, want_NH)
        assert_same_bits(d_x_NH, torch.autograd.grad(want_NH, x_NH, grad_NH)[0])


def test_compile_with_lists() -> None:
    compiled = torch.compile(tokenyard.sort_chunks, fullgraph=True, backend="aot_eager")
    x_N = torch.arange(6)
    assert compiled(x_N, [2, 0, 3], [2, 1, 0]).tolist() == [2, 3, 4, 0, 1, 5]


@pytest.mark.parametrize(
    "x, sizes, order, argument",
    [
        (torch.zeros(()), [0], [0], r"x\.dim\(\)"),
        ([1, 2], [1, 1], [0, 1], "x"),
        (torch.zeros(3), [1, 1], [0], "order"),
        (torch.zeros(3), [2, 2], [1, 0], "split_sizes"),
        (torch.zeros(3), [-1, 2], [1, 0], "split_sizes"),
        (torch.zeros(3), [1, 1], [0, 0], "order"),
        (torch.zeros(3), [1, 1], [1, 2], "order"),
        (torch.zeros(3), [1, 1], [-1, 0], "order"),
        (torch.zeros(3), torch.tensor([1, 1]), torch.tensor([1, 1]), "order"),
        (torch.zeros(3), torch.tensor([[1, 1]]), [1, 0], "split_sizes"),
        (torch.zeros(3), torch.tensor([1.0, 1.0]), [1, 0], "split_sizes"),
        (torch.zeros(3), [1, 1], torch.tensor([1.0, 0.0]), "order"),
    ],
)
def test_errors_name_operator_and_argument(
    x: object, sizes: object, order: object, argument: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"tokenyard\.sort_chunks: `{argument}`"):
        tokenyard.sort_chunks(x, sizes, order)  # type: ignore[arg-type]


def test_fractions_and_complex_numbers_are_refused() -> None:
    x = torch.arange(4.0)[:, None]
    with pytest.raises(ArgumentError, match="`split_sizes`: expected dtype in"):
        tokenyard.sort_chunks(x, [2.7, 1.3], [1, 0])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="`order`: expected dtype in"):
        tokenyard.sort_chunks(x, [3, 1], [1.0, 0.0])  # type: ignore[list-item]
    sizes = np.array([3, 1])
    assert torch.equal(tokenyard.sort_chunks(x, sizes, (1, 0)), x[[3, 0, 1, 2]])
    with pytest.raises(ArgumentError, match="`x`: expected a real dtype"):
        tokenyard.sort_chunks(x + 1j, [3, 1], [1, 0])
    assert torch.equal(tokenyard.sort_chunks(x, [], []), x)
