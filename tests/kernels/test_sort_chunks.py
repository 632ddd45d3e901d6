"""The kernel of sort_chunks in the interpreter, bit for bit against the definition."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import MOVED, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import launched
from torch import Tensor

import tokenyard

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

Lists = tuple[list[int], list[int]]


def expected(x: Tensor, split_sizes: list[int], order: list[int]) -> Tensor:
    chunks = x[: sum(split_sizes)].split(split_sizes)
    return torch.cat([*[chunks[i] for i in order], x[sum(split_sizes) :]])


def check(x: Tensor, split_sizes: list[int], order: list[int]) -> None:
    got, names = launched(lambda: tokenyard.sort_chunks(x, split_sizes, order))
    assert names == ["_sort_chunks_kernel"] * (x.numel() > 0 and len(order) > 0)
    assert got.is_contiguous()
    assert_same_bits(got, expected(x, split_sizes, order))


def random_lists(num_rows: int, num_chunks: int) -> Lists:
    """Sizes, a third of them 0, whose sum is at most num_rows; and an order."""
    cuts = sorted(random.choices(range(num_rows + 1), k=num_chunks))
    sizes = [b - a if random.random() > 0.3 else 0 for a, b in zip([0, *cuts], cuts)]
    return sizes, random.sample(range(num_chunks), num_chunks)


@st.composite
def lists(draw: Callable[..., Any]) -> Lists:
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    return sizes, draw(st.permutations(range(len(sizes))))


@settings(max_examples=30)
@given(lists(), st.integers(0, 3))
def test_drawn_chunks(drawn: Lists, rows_more: int) -> None:
    sizes, order = drawn
    check(torch.randn(sum(sizes) + rows_more, 3), sizes, order)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 17, 60, 64, 65, 256])
def test_numbers_of_chunks(num_chunks: int, poisoned_memory: None) -> None:
    check(torch.randn(100, 20).half(), *random_lists(100, num_chunks))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 127, 128, 129, 300])
def test_rows_at_a_block_boundary(num_rows: int, poisoned_memory: None) -> None:
    """8 rows a program at width 600, 128 at width 8."""
    for width in (8, 600):
        check(torch.randn(num_rows, width).half(), *random_lists(num_rows, 6))


@pytest.mark.parametrize("width", [1, 2, 20, 511, 512, 513, 1025, 2880, 16500])
def test_widths(width: int, poisoned_memory: None) -> None:
    for dtype in (torch.uint8, torch.float16, torch.float64):
        check((torch.randn(9, width) * 9).to(dtype), [3, 0, 4], [2, 0, 1])


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_dtypes_travel_bit_for_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (11, 20 * dtype.itemsize), dtype=torch.uint8)
    x = bits % 2 == 1 if dtype == torch.bool else bits.view(dtype)
    got, names = launched(lambda: tokenyard.sort_chunks(x, [2, 5, 3], [1, 2, 0]))
    assert names == ["_sort_chunks_kernel"]
    assert torch.equal(got.view(torch.uint8), expected(x.view(torch.uint8), [2, 5, 3], [1, 2, 0]))


@pytest.mark.parametrize(
    ("sizes_dtype", "order_dtype"),
    [(torch.int32, torch.int32), (torch.int64, torch.int32), (torch.int16, torch.uint8)],
)
def test_lists_as_tensors(sizes_dtype: torch.dtype, order_dtype: torch.dtype) -> None:
    x, sizes, order = torch.randn(12, 5), [3, 0, 4, 2], [2, 0, 3, 1]
    sizes_C = torch.tensor(sizes, dtype=sizes_dtype)
    order_C = torch.tensor([[i, 9] for i in order], dtype=order_dtype)[:, 0]  # strided
    got, names = launched(lambda: tokenyard.sort_chunks(x, sizes_C, order_C))
    assert names == ["_sort_chunks_kernel"]
    assert_same_bits(got, expected(x, sizes, order))


def test_sizes_whose_sum_no_small_type_holds() -> None:
    sizes_C = torch.tensor([100, 90, 80], dtype=torch.uint8)
    x = torch.randn(270, 2)
    got, _ = launched(lambda: tokenyard.sort_chunks(x, sizes_C, [2, 1, 0]))
    assert_same_bits(got, expected(x, [100, 90, 80], [2, 1, 0]))


def test_shapes_and_strides(poisoned_memory: None) -> None:
    for x in (
        torch.randn(12),
        torch.randn(12, 3, 5),
        torch.randn(12, 1, 1),
        torch.randn(12, 50)[:, 7:27],
        torch.randn(12, 40)[:, ::2],
        torch.randn(20, 12).T,
        torch.randn(5, 12, 3).transpose(0, 1),
        torch.randn(1, 20).expand(12, 20),
        torch.randn(12, 1).expand(12, 20),
        torch.randn(24)[::2],
        torch.randn(12 * 20 + 1)[1:].view(12, 20),
    ):
        check(x, [3, 5, 2], [2, 0, 1])


def test_nothing_to_move(poisoned_memory: None) -> None:
    check(torch.randn(0, 4), [0, 0], [1, 0])
    check(torch.randn(5, 0), [2, 3], [1, 0])
    check(torch.randn(5, 4), [0, 0], [1, 0])
    x = torch.randn(5, 4)
    got, names = launched(lambda: tokenyard.sort_chunks(x, [], []))
    assert names == []
    assert_same_bits(got, x)
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("expanded", [False, True])
def test_gradients(expanded: bool, poisoned_memory: None) -> None:
    """Also of rows past the chunks, which stay where they are."""
    grad = torch.randn(1, 1).expand(15, 4) if expanded else torch.randn(15, 4)
    sizes, order = [4, 0, 3, 6], [3, 1, 0, 2]

    def gradient() -> Tensor:
        x = torch.zeros(15, 4, requires_grad=True)
        return torch.autograd.grad(tokenyard.sort_chunks(x, sizes, order), x, grad)[0]

    got, names = launched(gradient)
    assert names == ["_sort_chunks_kernel"] * 2
    back = [order.index(i) for i in range(4)]
    assert_same_bits(got, expected(grad, [sizes[i] for i in order], back))
