"""The drop-in for grouped_gemm's permutation and GEMM, against loops over the documented rules."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FLOATS, assert_same_bits, integers, wide
from compat.id_maps import (
    EXAMPLE,
    EXAMPLE_A,
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
from tokenyard.compat import grouped_gemm as gg

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]


def as_map(row_of_slot: list[list[int]]) -> Tensor:
    return torch.tensor(column_major(row_of_slot), dtype=torch.int32)


def test_documented_example() -> None:
    rows, row_id_map = gg.permute(torch.arange(5.0)[:, None], EXAMPLE)
    assert rows.flatten().tolist() == EXAMPLE_ROWS
    assert row_id_map.dtype == torch.int32 and row_id_map.tolist() == EXAMPLE_B
    weights = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8], [9, 10]])
    assert gg.unpermute(rows, row_id_map, weights).flatten().tolist() == [0, 7, 22, 45, 76]


@pytest.mark.parametrize("id_dtype", INTEGERS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_round_trip_with_gradients(dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    """Duplicates, slots without an expert, ids without a bound, probabilities of any dtype."""
    ids = random_ids(17, 3, [-1, 0, 5, 6, 127])
    slots, row_of_slot = maps_of(ids)
    x = wide(17, 5, dtype=dtype).requires_grad_()
    rows, row_id_map = gg.permute(x, ids.to(id_dtype))
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 3))
    assert_same_bits(row_id_map, as_map(row_of_slot))
    grad = wide(51, 5, dtype=dtype)
    grad[torch.tensor(slots) < 0] = math.nan
    assert_same_bits(torch.autograd.grad(rows, x, grad)[0], combine(grad, row_of_slot))

    rows, grad = wide(51, 5, dtype=dtype), wide(17, 5, dtype=dtype)
    rows[torch.tensor(slots) < 0] = math.nan
    rows.requires_grad_()
    for prob_dtype in FLOATS:
        probs = torch.rand(17, 3).to(prob_dtype)
        probs[ids < 0] = math.nan
        probs.requires_grad_()
        out = gg.unpermute(rows, row_id_map, probs)
        assert_same_bits(out.detach(), combine(rows.detach(), row_of_slot, probs.detach()))
        got = torch.autograd.grad(out, (rows, probs), grad)
        want = combine_gradients(rows.detach(), row_of_slot, probs.detach(), grad)
        assert_same_bits(got[0], want[0])
        assert got[1].dtype == prob_dtype and (got[1][ids < 0] == 0).all()
        if prob_dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(got[1].double(), want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_token_num", [0, 5, 999])
@pytest.mark.parametrize("num_out", [None, -1, 0, 1, 9, 10, 14, torch.tensor(7)])
@pytest.mark.parametrize("ids", [EXAMPLE, EXAMPLE.masked_fill(EXAMPLE == 1, -1)])
def test_number_of_rows(num_out: Any, max_token_num: int, ids: Tensor) -> None:
    """Slots past it have no row; rows left over are zero, and what is in them is ignored."""
    num_rows = int(num_out) if num_out is not None and num_out > 0 else 10
    slots, row_of_slot = maps_of(ids, num_rows)
    x = torch.randn(5, 4, requires_grad=True)
    rows, row_id_map = gg.permute(x, ids, num_out, max_token_num)
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 2))
    assert_same_bits(row_id_map, as_map(row_of_slot))
    empty = torch.tensor(slots) < 0
    grad = torch.randn(num_rows, 4).masked_fill(empty[:, None], math.nan)
    assert_same_bits(torch.autograd.grad(rows, x, grad)[0], combine(grad, row_of_slot))
    dirty = rows.detach().masked_fill(empty[:, None], math.nan).requires_grad_()
    out = gg.unpermute(dirty, row_id_map, num_topK=2)
    assert_same_bits(out.detach(), combine(dirty.detach(), row_of_slot))
    (d_rows,) = torch.autograd.grad(out.sum(), dirty)
    assert_same_bits(d_rows, (~empty).float()[:, None].expand(-1, 4))


@pytest.mark.parametrize("shape", [(9,), (9, 1)])
def test_one_expert_per_token(shape: tuple[int, ...]) -> None:
    """1-D ids are K = 1, whose probabilities count and have a gradient."""
    ids = random_ids(9, 1, [0, 1, 2])
    x, probs = torch.randn(9, 4), torch.rand(9, 1, requires_grad=True)
    rows, row_id_map = gg.permute(x, ids.view(shape))
    assert_same_bits(rows, x[maps_of(ids)[0]])
    assert_same_bits(gg.unpermute(rows, row_id_map), x)
    out = gg.unpermute(rows, row_id_map, probs)
    assert_same_bits(out.detach(), x * probs.detach())
    (d_probs,) = torch.autograd.grad(out.sum(), probs)
    torch.testing.assert_close(d_probs, x.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


def test_without_probs() -> None:
    """The plain sum where K is known, by its name or by T; every slot by itself with the map alone."""
    x = torch.randn(5, 3)
    rows, row_id_map = gg.permute(x, EXAMPLE)
    assert_same_bits(gg.unpermute(rows, row_id_map), x.repeat(2, 1))
    for arguments in ({"num_topK": 2}, {"max_tokens": 5}, {"max_tokens": 9, "num_topK": 2}):
        assert_same_bits(gg.unpermute(rows, row_id_map, **arguments), 2 * x)
    probs = torch.full((5, 2), 0.5)
    for more in ({"max_tokens": 5}, {"max_tokens": 9, "num_topK": 2}, {"num_topK": 0}):
        assert_same_bits(gg.unpermute(rows, row_id_map, probs, **more), x)


def test_int64_map_warns_as_the_peer() -> None:
    rows, row_id_map = gg.permute(torch.randn(5, 3), EXAMPLE)
    probs = torch.rand(5, 2)
    with pytest.warns(UserWarning, match="row_id_map.*int64.*cuda_token_unpermute_torch"):
        out = gg.unpermute(rows, row_id_map.long(), probs)
    assert_same_bits(out, gg.unpermute(rows, row_id_map, probs))


@pytest.mark.filterwarnings("ignore:.*int64")
def test_an_argsort_is_refused_where_it_shows() -> None:
    """By its length or its entries; the message says where it belongs."""
    argsort, probs = torch.tensor(EXAMPLE_A), torch.rand(5, 2)
    few = torch.randn(7, 3)
    for arguments in ((few, argsort[:7], probs), (few, argsort), (few, argsort.int(), probs)):
        with pytest.raises(ArgumentError, match=r"`row_id_map`.*cuda_token_unpermute_torch"):
            gg.unpermute(*arguments)


@pytest.mark.parametrize("num_out", [None, 2])
@pytest.mark.parametrize("trans_b", [False, True])
def test_no_tokens(num_out: int | None, trans_b: bool) -> None:
    x = torch.zeros(0, 4, requires_grad=True)
    probs = torch.zeros(0, 2, requires_grad=True)
    weights = torch.randn((3, 6, 4) if trans_b else (3, 4, 6), requires_grad=True)
    rows, row_id_map = gg.permute(x, torch.zeros(0, 2, dtype=torch.int32), num_out)
    assert rows.shape == (num_out or 0, 4) and (rows == 0).all() and row_id_map.shape == (0,)
    out = gg.gmm(rows, weights, torch.zeros(3, dtype=torch.int64), trans_b)
    assert out.shape == (num_out or 0, 6)
    assert gg.unpermute(out, row_id_map).shape == (0, 6)
    out = gg.unpermute(out, row_id_map, probs)
    grads = torch.autograd.grad(out.sum(), (x, weights, probs))
    assert [g.shape for g in grads] == [x.shape, weights.shape, probs.shape]
    assert (grads[1] == 0).all()


@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_routed() -> None:
    """Zeros with a graph, so that every rank of a job runs its backward."""
    x = torch.randn(4, 5, requires_grad=True)
    weights = torch.randn(3, 5, 6, requires_grad=True)
    probs = torch.full((4, 2), math.nan, requires_grad=True)
    rows, row_id_map = gg.permute(x, torch.full((4, 2), -1, dtype=torch.int32), 3)
    assert rows.shape == (3, 5) and (row_id_map == -1).all()
    out = gg.gmm(rows, weights, torch.zeros(3, dtype=torch.int64))
    out = gg.unpermute(out, row_id_map, probs)
    assert out.shape == (4, 6) and (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), (x, weights, probs)):
        assert (grad == 0).all()


def test_strided_inputs_and_expanded_gradients() -> None:
    ids = random_ids(2, 12, [-1, 0, 1, 4]).t()
    slots, row_of_slot = maps_of(ids)
    x = torch.randn(12, 10)[:, 1:9:2].requires_grad_()
    rows, row_id_map = gg.permute(x, ids)
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 2))
    (d_x,) = torch.autograd.grad(rows.sum(), x)
    assert_same_bits(d_x, (ids >= 0).sum(1, keepdim=True).float().expand(12, 4))
    rows = torch.randn(4, 24).t()[:, ::2].requires_grad_()
    probs = torch.rand(2, 12).t().requires_grad_()
    out = gg.unpermute(rows, torch.stack([row_id_map] * 2, 1)[:, 0], probs)
    assert_same_bits(out.detach(), combine(rows.detach(), row_of_slot, probs.detach()))
    got = torch.autograd.grad(out.sum(), (rows, probs))
    want = combine_gradients(rows.detach(), row_of_slot, probs.detach(), torch.ones(12, 2))
    assert_same_bits(got[0], want[0])
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("size_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 4, 9], [0, 0, 0], [0, 13, 0]])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gmm(dtype: torch.dtype, sizes: list[int], size_dtype: torch.dtype, trans_b: bool) -> None:
    """Empty experts, and rows past the last expert, which are zero and not read."""
    a, weight_EKN = integers(13, 8, dtype=dtype), integers(3, 8, 6, dtype=dtype)
    grad = integers(13, 6, dtype=dtype)
    a[sum(sizes) :] = grad[sum(sizes) :] = math.nan
    b = (
        weight_EKN.transpose(1, 2).contiguous() if trans_b else weight_EKN.clone()
    ).requires_grad_()
    a.requires_grad_()
    out = gg.gmm(a, b, torch.tensor(sizes, dtype=size_dtype), trans_b)
    d_a, d_b = torch.autograd.grad(out, (a, b), grad)
    want_b = multiply_transposed(a.detach(), grad, sizes)
    for result, want in (
        (out, multiply(a.detach(), weight_EKN, sizes)),
        (d_a, multiply(grad, weight_EKN.transpose(1, 2), sizes)),
        (d_b, want_b.transpose(1, 2) if trans_b else want_b),
    ):
        assert result.dtype == dtype and torch.equal(result, want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gmm_of_strided_operands_and_expanded_gradients(dtype: torch.dtype) -> None:
    """A chunk of wider rows, transposed weights, an odd hidden size."""
    a = integers(7, 10, dtype=dtype)[:, 5:].requires_grad_()
    b = integers(2, 3, 5, dtype=dtype).transpose(1, 2).requires_grad_()
    ones = torch.ones(7, 3, dtype=dtype)
    out = gg.gmm(a, b, torch.tensor([4, 3]))
    assert torch.equal(out, multiply(a.detach(), b.detach(), [4, 3]))
    d_a, d_b = torch.autograd.grad(out.sum(), (a, b))
    assert torch.equal(d_a, multiply(ones, b.detach().transpose(1, 2), [4, 3]))
    assert torch.equal(d_b, multiply_transposed(a.detach(), ones, [4, 3]))


def test_gradients_by_finite_differences() -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    ids, sizes = random_ids(5, 2, [-1, 0, 1]), torch.tensor([3, 0, 4])
    _, row_id_map = gg.permute(torch.zeros(5, 3), ids, 8)
    assert gradcheck(lambda a: gg.permute(a, ids, 8)[0], random(5, 3))
    assert gradcheck(lambda a, p: gg.unpermute(a, row_id_map, p), (random(8, 3), random(5, 2)))
    assert gradcheck(lambda a: gg.unpermute(a, row_id_map, num_topK=2), random(8, 3))
    assert gradcheck(lambda a, b: gg.gmm(a, b, sizes), (random(8, 2), random(3, 2, 4)))
    assert gradcheck(lambda a, b: gg.gmm(a, b, sizes, True), (random(8, 2), random(3, 4, 2)))


def moe(x: Tensor, ids: Tensor, weights: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
    rows, row_id_map = gg.permute(x, ids)
    return gg.unpermute(gg.gmm(rows, weights, sizes), row_id_map, probs)


def test_compiles_as_one_graph() -> None:
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 8):
        ids = random_ids(num_tokens, 2, [0, 1, 3], True)
        inputs = [torch.randn(num_tokens, 4), torch.randn(4, 4, 6), torch.rand(num_tokens, 2)]
        x, weights, probs = (value.requires_grad_() for value in inputs)
        sizes = torch.bincount(ids.flatten(), minlength=4)
        got, want = (f(x, ids, weights, sizes, probs) for f in (compiled, moe))
        torch.testing.assert_close(got, want)
        grad = torch.randn(num_tokens, 6)
        grads = (torch.autograd.grad(out, (x, weights, probs), grad) for out in (got, want))
        for result, expected in zip(*grads):
            torch.testing.assert_close(result, expected)


def test_autocast() -> None:
    """The GEMM follows it, in both operands; the moves keep the dtype of the rows."""
    bf16 = torch.bfloat16
    a, b = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, dtype=torch.float16)
    sizes = torch.tensor([4, 2])
    with torch.autocast("cpu", bf16):
        rows, row_id_map = gg.permute(a, torch.tensor([1, 0, 0, 1, 0, 0]))
        out = gg.gmm(rows, b, sizes)
        combined = gg.unpermute(out, row_id_map, torch.rand(6, 1))
    assert [t.dtype for t in (rows, out, combined)] == [torch.float32, bf16, bf16]
    assert_same_bits(out, gg.gmm(rows.to(bf16), b.to(bf16), sizes))
    assert torch.autograd.grad(combined.sum(), a)[0].dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    x, probs, b = torch.randn(5, 3), torch.rand(5, 2), torch.randn(2, 3, 4)
    rows, row_id_map = gg.permute(x, EXAMPLE)
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("input_act", gg.permute, (x[:4], EXAMPLE)),
        ("indices", gg.permute, (x, EXAMPLE.float())),
        ("indices", gg.permute, (x, EXAMPLE[None])),
        ("num_out_tokens", gg.permute, (x, EXAMPLE, torch.tensor(7.0))),
        ("row_id_map", gg.unpermute, (rows, row_id_map.short(), probs)),
        ("row_id_map", gg.unpermute, (rows, row_id_map[:8], probs)),
        ("row_id_map", gg.unpermute, (rows[:9], row_id_map, probs)),
        ("probs", gg.unpermute, (rows, row_id_map, probs, None, 5)),
        ("len(row_id_map)", gg.unpermute, (rows, row_id_map, None, None, 3)),
        ("len(row_id_map)", gg.unpermute, (rows, row_id_map, None, 4)),
        ("max_tokens", gg.unpermute, (rows, row_id_map, probs, 4)),
        ("num_topK", gg.unpermute, (rows, row_id_map, None, None, -1)),
        ("batch_sizes", gg.gmm, (rows, b, torch.tensor([6, 5]))),
        ("batch_sizes", gg.gmm, (rows, b, torch.tensor([11, -1]))),
        ("batch_sizes", gg.gmm, (rows, b, torch.tensor([5.0, 5.0]))),
        ("b", gg.gmm, (rows, b, torch.tensor([3, 3, 4]))),
        ("b", gg.gmm, (rows, b, torch.tensor([5, 5]), True)),
        ("b", gg.gmm, (rows, b.double(), torch.tensor([5, 5]))),
    ]
    for argument, function, arguments in calls:
        message = rf"tokenyard\.compat\.grouped_gemm\.\w+: {re.escape(f'`{argument}`')}"
        with pytest.raises(ArgumentError, match=message):
            function(*arguments)
