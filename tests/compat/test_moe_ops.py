"""The drop-in for moe_ops, against loops over the documented rules."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FLOATS, assert_same_bits, integers, wide
from compat.id_maps import (
    EXAMPLE,
    EXAMPLE_B,
    EXAMPLE_ROWS,
    column_major,
    combine,
    combine_gradients,
    gather,
    maps_of,
    multiply,
    multiply_transposed,
    random_ids,
)
from torch import Tensor
from torch.autograd import gradcheck

from tokenyard import ArgumentError
from tokenyard.compat import moe_ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
E = 6  # no power of two


def some_ids() -> Tensor:
    """[17,3] with duplicates, the ids -1 and E, and experts 1, 3 and 4 empty."""
    return random_ids(17, 3, [-1, 0, 2, 5, E])


def shuffled(row_of_slot: list[list[int]], ids: Tensor) -> list[list[int]]:
    """The same with each expert's rows in any order, as the atomics of the peer leave them."""
    rows, experts = torch.tensor(row_of_slot), ids.where((ids >= 0) & (ids < E), -1)
    for expert in range(E):
        own = rows[experts == expert]
        rows[experts == expert] = own[torch.randperm(len(own))]
    return rows.tolist()


def as_map(row_of_slot: list[list[int]]) -> Tensor:
    return torch.tensor(column_major(row_of_slot), dtype=torch.int32)


def test_documented_example() -> None:
    rows, row_id_map, offsets = moe_ops.permute(torch.arange(5.0)[:, None], EXAMPLE, E=3)
    assert rows.flatten().tolist() == EXAMPLE_ROWS
    assert row_id_map.dtype == torch.int32 and row_id_map.tolist() == EXAMPLE_B
    assert offsets.dtype == torch.int32 and offsets.tolist() == [0, 3, 7, 10]
    prob = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8], [9, 10]])
    out = moe_ops.unpermute(rows, row_id_map, prob, num_tokens=5, num_topK=2)
    assert out.flatten().tolist() == [0, 7, 22, 45, 76]


@pytest.mark.parametrize("fp32_routing", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fused_topk_softmax(dtype: torch.dtype, fp32_routing: bool) -> None:
    """Ties, NaN, fewer than K finite logits, and none; on logits that are not contiguous."""
    logits = torch.randn(5, 9).to(dtype).t()
    logits[0] = 1.5
    logits[1] = torch.tensor([0.5, 2, 0.5, 2, 0.5])
    logits[2] = torch.tensor([-math.inf, -math.inf, -math.inf, 1, -math.inf])
    logits[3, 4] = math.nan
    weights, indices = moe_ops.fused_topk_softmax(logits, 3, fp32_routing)
    want_ids, want = [], []
    for row in logits.tolist():
        row = [-math.inf if math.isnan(value) else value for value in row]
        ids = sorted(range(5), key=lambda expert: (-row[expert], expert))[:3]
        terms = [math.exp(row[expert] - row[ids[0]]) for expert in ids]
        want_ids.append(ids)
        want.append([term / sum(terms) for term in terms])
    assert indices.dtype == torch.int32 and indices.tolist() == want_ids
    assert weights.dtype == (torch.float32 if fp32_routing else dtype)
    exact, rtol = torch.tensor(want, dtype=torch.float64), TOLERANCE[weights.dtype]
    torch.testing.assert_close(weights.double(), exact, rtol=rtol, atol=0)
    assert weights[2].tolist() == [1, 0, 0]
    weights, indices = moe_ops.fused_topk_softmax(torch.full((2, 4), -math.inf), 2)
    assert weights.tolist() == [[0, 0]] * 2 and indices.tolist() == [[0, 1]] * 2


def test_gradient_of_fused_topk_softmax() -> None:
    """The one of bf16 logits comes from weights that were not rounded."""
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda z: moe_ops.fused_topk_softmax(z, 3)[0], logits)
    logits = torch.randn(9, 5).bfloat16().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    grad = torch.randn(9, 3).bfloat16()
    (want,) = torch.autograd.grad(exact.topk(3).values.softmax(1), exact, grad.double())
    for fp32_routing in (False, True):
        weights, _ = moe_ops.fused_topk_softmax(logits, 3, fp32_routing)
        (got,) = torch.autograd.grad(weights, logits, grad.to(weights.dtype))
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("num_out", [-1, 0, 4, 51, 56])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permute(dtype: torch.dtype, num_out: int) -> None:
    """Fewer rows than slots drop nothing; rows left over are zero, and their gradient is ignored."""
    ids, num_rows = some_ids(), max(num_out, 51)
    slots, row_of_slot = maps_of(ids.masked_fill(ids == E, -1), num_rows)
    x = wide(5, 17, dtype=dtype).t().requires_grad_()
    rows, row_id_map, offsets = moe_ops.permute(x, ids, num_out, E)
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 3))
    assert_same_bits(row_id_map, as_map(row_of_slot))
    ends = [int(((ids >= 0) & (ids < expert)).sum()) for expert in range(E + 1)]
    assert_same_bits(offsets, torch.tensor(ends, dtype=torch.int32))

    grad = wide(num_rows, 5, dtype=dtype)
    grad[torch.tensor(slots) < 0] = math.nan
    (d_x,) = torch.autograd.grad(rows, x, grad)
    assert_same_bits(d_x, combine(grad, row_of_slot))
    assert_same_bits(moe_ops.permute_backward(grad, row_id_map, 17, 3), d_x)
    peers_rows = shuffled(row_of_slot, ids)
    got = moe_ops.permute_backward(grad, as_map(peers_rows), 17, 3)
    assert_same_bits(got, combine(grad, peers_rows))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_permute_with_ids_of_any_dtype_and_strides(dtype: torch.dtype) -> None:
    ids, x = random_ids(3, 12, [0, 2, 5]).t(), torch.randn(12, 4)
    slots, row_of_slot = maps_of(ids)
    rows, row_id_map, _ = moe_ops.permute(x, ids.to(dtype), E=E)
    assert_same_bits(rows, gather(x, slots, 3))
    assert_same_bits(row_id_map, as_map(row_of_slot))


@pytest.mark.parametrize("num_experts", [None, 0])
def test_permute_without_the_number_of_experts(num_experts: int | None) -> None:
    ids, x = torch.tensor([[1, 0], [6, 1]]), torch.randn(2, 4)
    rows, _, offsets = moe_ops.permute(x, ids, E=num_experts)
    assert offsets.tolist() == [0, 1, 3, 3, 3, 3, 3, 4]
    assert_same_bits(rows, x[[0, 0, 1, 1]])
    _, row_id_map, offsets = moe_ops.permute(x, torch.full((2, 2), -1), E=num_experts)
    assert row_id_map.tolist() == [-1] * 4 and offsets.tolist() == [0, 0]
    rows, row_id_map, offsets = moe_ops.permute(x[:0], ids[:0], E=num_experts)
    assert rows.shape == (0, 4) and row_id_map.shape == (0,) and offsets.tolist() == [0, 0]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("prob_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermute(dtype: torch.dtype, prob_dtype: torch.dtype) -> None:
    """By a map of the peer, with slots that have no row and rows that have no slot."""
    ids = some_ids()
    slots, row_of_slot = maps_of(ids.masked_fill(ids == E, -1), 53)
    row_of_slot = shuffled(row_of_slot, ids)
    absent = torch.tensor(row_of_slot) < 0
    rows, grad = wide(53, 5, dtype=dtype), wide(17, 5, dtype=dtype)
    prob = torch.rand(3, 17).to(prob_dtype).t()
    rows[torch.tensor(slots) < 0] = math.nan
    prob[absent] = math.nan
    want = combine(rows, row_of_slot, prob)
    want_rows, want_prob = combine_gradients(rows, row_of_slot, prob, grad)
    rows, prob = rows.requires_grad_(), prob.requires_grad_()
    arguments = (as_map(row_of_slot), prob, 17, 3)
    out = moe_ops.unpermute(rows, *arguments)
    assert_same_bits(out.detach(), want)
    assert_same_bits(moe_ops.unpermute_forward(rows, *arguments).detach(), want)

    d_rows, d_prob = torch.autograd.grad(out, (rows, prob), grad)
    assert_same_bits(d_rows, want_rows)
    assert d_prob.dtype == prob_dtype and (d_prob[absent] == 0).all()
    if prob_dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(d_prob.double(), want_prob, rtol=1e-4, atol=1e-4)
    direct = moe_ops.unpermute_backward(grad, rows, *arguments)
    for value, expected in zip(direct, (d_rows, d_prob)):
        assert not value.requires_grad
        assert_same_bits(value, expected)


@pytest.mark.parametrize("max_tokens", [-1, 0, 13, 17, 20])
def test_unpermute_to_another_number_of_tokens(max_tokens: int) -> None:
    """The first tokens, or all and then zeros; forward and gradients."""
    _, row_of_slot = maps_of(random_ids(17, 3, [0, 2, 5]))
    rows, prob = torch.randn(51, 5, requires_grad=True), torch.rand(17, 3, requires_grad=True)
    size = 17 if max_tokens == -1 else max_tokens
    shared = min(size, 17)
    out = moe_ops.unpermute(rows, as_map(row_of_slot), prob, 17, 3, max_tokens)
    whole = combine(rows.detach(), row_of_slot, prob.detach())
    assert_same_bits(out.detach(), torch.cat([whole[:shared], torch.zeros(size - shared, 5)]))
    grad = torch.randn(size, 5)
    got = torch.autograd.grad(out, (rows, prob), grad)
    grad = torch.cat([grad[:shared], torch.zeros(17 - shared, 5)])
    want = combine_gradients(rows.detach(), row_of_slot, prob.detach(), grad)
    assert_same_bits(got[0], want[0])
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("trans_b", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("offset_dtype, ends", [(torch.int32, False), (torch.int64, True)])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 4, 9], [0, 0, 0], [0, 13, 0]])
@pytest.mark.parametrize("dtype", FLOATS)
def test_grouped_gemm(
    dtype: torch.dtype,
    sizes: list[int],
    offset_dtype: torch.dtype,
    ends: bool,
    contiguous: bool,
    trans_b: bool,
) -> None:
    """Both forms of offsets, empty experts, and rows past the last, which are not read."""
    a, weight_EKN = integers(13, 16, dtype=dtype)[:, ::2], integers(3, 8, 6, dtype=dtype)
    grad = integers(13, 6, dtype=dtype)
    a[sum(sizes) :] = grad[sum(sizes) :] = math.nan
    b = weight_EKN.transpose(1, 2) if trans_b else weight_EKN
    b = b.contiguous() if contiguous else b.transpose(0, 2).contiguous().transpose(0, 2)
    want_b = multiply_transposed(a, grad, sizes)
    wants = (
        multiply(a, weight_EKN, sizes),
        multiply(grad, weight_EKN.transpose(1, 2), sizes),
        want_b.transpose(1, 2) if trans_b else want_b,
    )
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(offset_dtype)[ends:]
    a, b = a.requires_grad_(), b.requires_grad_()
    out = moe_ops.grouped_gemm(a, b, offsets, trans_b)
    for got, want in zip((out, *torch.autograd.grad(out, (a, b), grad)), wants):
        assert got.dtype == dtype and torch.equal(got, want)


def test_grouped_gemm_under_autocast() -> None:
    a, b = torch.randn(10, 4), torch.randn(3, 6, 4).bfloat16()
    offsets = torch.tensor([0, 3, 3, 10])
    with torch.autocast("cpu", torch.bfloat16):
        out = moe_ops.grouped_gemm(a, b, offsets)
    assert_same_bits(out, moe_ops.grouped_gemm(a.bfloat16(), b, offsets))


def layer(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """As users of the peer write it, but for w2, which is [E,K,N], and its offsets, which are ends."""
    weights, indices = moe_ops.fused_topk_softmax(logits, 2)
    rows, row_id_map, offsets = moe_ops.permute(x, indices, E=logits.shape[1])
    rows = moe_ops.grouped_gemm(rows, w1, offsets)
    rows = moe_ops.grouped_gemm(rows, w2, offsets[1:], trans_b=False)
    return moe_ops.unpermute(rows, row_id_map, weights, num_tokens=x.shape[0], num_topK=2)


def layer_arguments(num_tokens: int) -> list[Tensor]:
    """Three experts of which the last is empty."""
    logits = torch.randn(num_tokens, 3, dtype=torch.float64)
    logits[:, 2] -= 100
    shapes = [(num_tokens, 4), (3, 5, 4), (3, 5, 4)]
    x, w1, w2 = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [value.requires_grad_() for value in (x, logits, w1, w2)]


def test_layer() -> None:
    x, logits, w1, w2 = arguments = layer_arguments(4)
    out = layer(*arguments)
    for token in range(4):
        weights, experts = logits[token].topk(2)
        want = sum(
            p * (w1[e] @ x[token]) @ w2[e] for p, e in zip(weights.softmax(0), experts.tolist())
        )
        torch.testing.assert_close(out[token], want)
    assert gradcheck(layer, arguments)


def test_layer_without_tokens() -> None:
    arguments = layer_arguments(0)
    out = layer(*arguments)
    assert out.shape == (0, 4)
    for value, grad in zip(arguments, torch.autograd.grad(out.sum(), arguments)):
        assert grad.shape == value.shape and (grad == 0).all()


@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_routed() -> None:
    """Zeros with a graph, so that every rank of a job runs its backward."""
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(3, 6, 5, requires_grad=True)
    prob = torch.full((4, 2), math.nan, requires_grad=True)
    rows, row_id_map, offsets = moe_ops.permute(x, torch.full((4, 2), 3), E=3)
    assert (row_id_map == -1).all() and (offsets == 0).all()
    out = moe_ops.unpermute(moe_ops.grouped_gemm(rows, w, offsets), row_id_map, prob, 4, 2)
    assert out.shape == (4, 6) and (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), (x, w, prob)):
        assert (grad == 0).all()


def test_compiles_as_one_graph() -> None:
    def step(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
        prob, indices = moe_ops.fused_topk_softmax(logits.detach(), 2)
        rows, row_id_map, _ = moe_ops.permute(x.detach(), indices, E=3)
        return (
            layer(x, logits, w1, w2),
            moe_ops.permute_backward(rows, row_id_map, x.shape[0], 2),
            *moe_ops.unpermute_backward(x, rows, row_id_map, prob, x.shape[0], 2),
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (4, 7):
        arguments = layer_arguments(num_tokens)
        want, got = step(*arguments), compiled(*arguments)
        for value, expected in zip(got, want):
            assert_same_bits(value.detach(), expected.detach())
        grad = torch.randn_like(want[0])
        grads = [torch.autograd.grad(out[0], arguments, grad) for out in (got, want)]
        for value, expected in zip(*grads):
            assert_same_bits(value, expected)


def test_supports_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(gpu: bool, cuda: str | None, capability: tuple[int, int]) -> list[bool]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        dtypes = (None, torch.float16, torch.bfloat16, torch.float32)
        return [moe_ops.supports_tma(dtype) for dtype in dtypes]

    assert machine(True, "12.8", (9, 0)) == [True, True, True, False]
    assert machine(True, "12.8", (8, 9)) == [False] * 4
    assert machine(True, None, (9, 4)) == [False] * 4
    assert machine(False, "12.8", (9, 0)) == [False] * 4


X, IDS = torch.zeros(4, 6), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1]])
ROWS, MAP, PROB = torch.zeros(8, 6), torch.arange(8, dtype=torch.int32), torch.zeros(4, 2)
B, OFFSETS = torch.zeros(3, 5, 6), torch.tensor([0, 3, 6, 8])
ERRORS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("`K`: expected 1 to E = 6", moe_ops.fused_topk_softmax, (X, 7)),
    ("`K`: expected 1 to E = 6", moe_ops.fused_topk_softmax, (X, 0)),
    (r"`logits`: expected shape \[T, E\]", moe_ops.fused_topk_softmax, (X[0], 1)),
    ("`logits`: expected dtype", moe_ops.fused_topk_softmax, (X.int(), 1)),
    ("`indices`: expected dtype", moe_ops.permute, (X, IDS.float())),
    (r"`indices`: expected shape \[T, K\]", moe_ops.permute, (X, IDS[0])),
    (r"`input`: expected shape \[4, H\]", moe_ops.permute, (X[:3], IDS)),
    ("`num_out_tokens`: expected an integer", moe_ops.permute, (X, IDS, 8.5)),
    ("`num_out_tokens`: expected at least -1", moe_ops.permute, (X, IDS, -2)),
    ("expected ids from -1 to 1, got ids from 0 to 2", moe_ops.permute, (X, IDS, 0, 1)),
    (r"`row_id_map`: expected shape \[10\]", moe_ops.unpermute, (ROWS, MAP, PROB, 5, 2)),
    ("`row_id_map`: expected dtype", moe_ops.unpermute, (ROWS, MAP.float(), PROB, 4, 2)),
    ("entries from -1 to 6, rows of input", moe_ops.unpermute, (ROWS[:7], MAP, PROB, 4, 2)),
    ("`input`: expected dtype", moe_ops.unpermute, (ROWS.int(), MAP, PROB, 4, 2)),
    (r"`prob`: expected shape \[4, 2\]", moe_ops.unpermute, (ROWS, MAP, PROB.t(), 4, 2)),
    ("`prob`: expected dtype", moe_ops.unpermute, (ROWS, MAP, PROB.int(), 4, 2)),
    ("`max_tokens`: expected at least -1", moe_ops.unpermute, (ROWS, MAP, PROB, 4, 2, -2)),
    ("`grad_permuted`: expected shape", moe_ops.permute_backward, (ROWS[0], MAP, 4, 2)),
    (r"`row_id_map`: expected shape \[12\]", moe_ops.permute_backward, (ROWS, MAP, 4, 3)),
    (
        r"`grad_out`: expected shape \[4, 6\]",
        moe_ops.unpermute_backward,
        (X[:3], ROWS, MAP, PROB, 4, 2),
    ),
    (
        "`grad_out`: expected torch.float32",
        moe_ops.unpermute_backward,
        (X.half(), ROWS, MAP, PROB, 4, 2),
    ),
    ("`prob`: expected shape", moe_ops.unpermute_backward, (X, ROWS, MAP, PROB[:3], 4, 2)),
    ("`A`: expected shape", moe_ops.grouped_gemm, (ROWS[0], B, OFFSETS)),
    (r"`B`: expected shape \[E, N, 6\]", moe_ops.grouped_gemm, (ROWS, B.mT, OFFSETS)),
    (r"`B`: expected shape \[E, 6, N\]", moe_ops.grouped_gemm, (ROWS, B, OFFSETS, False)),
    ("`B`: expected torch.float32", moe_ops.grouped_gemm, (ROWS, B.half(), OFFSETS)),
    (r"`offsets`: expected shape \[4\] or \[3\]", moe_ops.grouped_gemm, (ROWS, B, OFFSETS[2:])),
    ("`offsets`: expected dtype", moe_ops.grouped_gemm, (ROWS, B, OFFSETS.float())),
    ("offsets that start at 0", moe_ops.grouped_gemm, (ROWS, B, OFFSETS + 1)),
    ("end at 8 at most", moe_ops.grouped_gemm, (ROWS, B, OFFSETS[1:] + 1)),
]


@pytest.mark.parametrize("message, function, arguments", ERRORS)
def test_bad_arguments_are_named(
    message: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ArgumentError, match=message):
        function(*arguments)
