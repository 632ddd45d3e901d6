"""The drop-in for xtuner's permutation and grouped GEMMs, against loops over the documented rules."""

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

from tokenyard import ArgumentError, conventions
from tokenyard.compat import xtuner

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
# name -> permute, unpermute, whether the map is row -> slot
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "ops": (xtuner.permute, xtuner.unpermute, False),
    "cuda": (xtuner.cuda_token_permute, xtuner.cuda_token_unpermute, False),
    "torch": (xtuner.cuda_token_permute_torch, xtuner.cuda_token_unpermute_torch, True),
}
both = pytest.mark.parametrize("pair", ["ops", "torch"])


def expected_map(pair: str, slots: list[int], row_of_slot: list[list[int]]) -> Tensor:
    if PAIRS[pair][2]:
        return torch.tensor(slots, dtype=torch.int64)
    return torch.tensor(column_major(row_of_slot), dtype=torch.int32)


@pytest.mark.parametrize("pair", PAIRS)
def test_documented_example(pair: str) -> None:
    permute, unpermute, row_to_slot = PAIRS[pair]
    rows, row_id_map = permute(torch.arange(5.0)[:, None], EXAMPLE)
    assert rows.flatten().tolist() == EXAMPLE_ROWS
    assert row_id_map.tolist() == (EXAMPLE_A if row_to_slot else EXAMPLE_B)
    assert row_id_map.dtype == (torch.int64 if row_to_slot else torch.int32)
    weights = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8], [9, 10]])
    assert unpermute(rows, row_id_map, weights).flatten().tolist() == [0, 7, 22, 45, 76]


def test_both_maps_go_with_the_same_grouped_gemm_and_convert() -> None:
    ids, x, weights = random_ids(20, 3, [0, 2, 3], True), torch.randn(20, 4), torch.randn(4, 5, 4)
    rows, map_b = xtuner.permute(x, ids)
    rows_a, map_a = xtuner.cuda_token_permute_torch(x, ids)
    assert_same_bits(rows, rows_a)
    counts = torch.bincount(ids.flatten(), minlength=4)
    offsets = conventions.from_group_counts(counts)
    routing = conventions.from_sorted_slots(map_a, offsets, 3)
    assert_same_bits(conventions.to_row_id_map(routing), map_b)
    routing = conventions.from_row_id_map(map_b, offsets, 3)
    assert_same_bits(conventions.to_sorted_slots(routing), map_a)
    out, probs = xtuner.group_gemm(rows, weights, counts), torch.rand(20, 3)
    assert_same_bits(
        xtuner.unpermute(out, map_b, probs), xtuner.cuda_token_unpermute_torch(out, map_a, probs)
    )


@both
@pytest.mark.parametrize("id_dtype", INTEGERS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_round_trip_with_gradients(pair: str, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    """Duplicates, slots without an expert, ids without a bound."""
    permute, unpermute, _ = PAIRS[pair]
    ids = random_ids(17, 3, [-1, 0, 5, 6, 127])
    slots, row_of_slot = maps_of(ids)
    x = wide(17, 5, dtype=dtype).requires_grad_()
    rows, row_id_map = permute(x, ids.to(id_dtype))
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 3))
    assert_same_bits(row_id_map, expected_map(pair, slots, row_of_slot))
    grad = wide(51, 5, dtype=dtype)
    grad[torch.tensor(slots) < 0] = math.nan
    assert_same_bits(torch.autograd.grad(rows, x, grad)[0], combine(grad, row_of_slot))

    rows = wide(51, 5, dtype=dtype)
    rows[torch.tensor(slots) < 0] = math.nan
    rows.requires_grad_()
    probs = torch.rand(17, 3)
    probs[ids < 0] = math.nan
    probs.requires_grad_()
    out = unpermute(rows, row_id_map, probs)
    assert_same_bits(out.detach(), combine(rows.detach(), row_of_slot, probs.detach()))
    grad = wide(17, 5, dtype=dtype)
    got = torch.autograd.grad(out, (rows, probs), grad)
    want = combine_gradients(rows.detach(), row_of_slot, probs.detach(), grad)
    assert_same_bits(got[0], want[0])
    assert got[1].dtype == torch.float32 and (got[1][ids < 0] == 0).all()
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("dtype", FLOATS)
def test_probabilities_of_any_dtype(pair: str, dtype: torch.dtype) -> None:
    permute, unpermute, _ = PAIRS[pair]
    ids = random_ids(9, 2, [0, 1, 2])
    rows, probs = torch.randn(18, 4), torch.rand(9, 2).to(dtype).requires_grad_()
    _, row_id_map = permute(torch.zeros(9, 4), ids)
    out = unpermute(rows, row_id_map, probs)
    assert_same_bits(out.detach(), combine(rows, maps_of(ids)[1], probs.detach()))
    assert torch.autograd.grad(out.sum(), probs)[0].dtype == dtype


@both
@pytest.mark.parametrize("shape", [(9,), (9, 1)])
def test_one_expert_per_token(pair: str, shape: tuple[int, ...]) -> None:
    """1-D ids are K = 1, whose probabilities count; without them every row goes back."""
    permute, unpermute, _ = PAIRS[pair]
    ids = random_ids(9, 1, [0, 1, 2])
    slots, row_of_slot = maps_of(ids)
    x, probs = torch.randn(9, 4), torch.rand(9, 1, requires_grad=True)
    rows, row_id_map = permute(x, ids.view(shape))
    assert_same_bits(rows, x[slots])
    assert_same_bits(row_id_map, expected_map(pair, slots, row_of_slot))
    assert_same_bits(unpermute(rows, row_id_map), x)
    out = unpermute(rows, row_id_map, probs)
    torch.testing.assert_close(out, x * probs)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), probs)[0], x.sum(1, keepdim=True), rtol=1e-5, atol=1e-5
    )


@both
def test_without_probs_every_slot_is_a_token(pair: str) -> None:
    """K is 1, since a map does not tell it; the plain sum is that with probs of ones."""
    permute, unpermute, row_to_slot = PAIRS[pair]
    x = torch.randn(5, 3)
    rows, row_id_map = permute(x, EXAMPLE)
    rows.requires_grad_()
    out = unpermute(rows, row_id_map)
    want = x.repeat_interleave(2, 0) if row_to_slot else x.repeat(2, 1)
    assert_same_bits(out.detach(), want)
    grad = torch.randn(10, 3)
    (d_rows,) = torch.autograd.grad(out, rows, grad)
    back = torch.tensor(EXAMPLE_A) if row_to_slot else torch.tensor(EXAMPLE_B).argsort()
    assert_same_bits(d_rows, grad[back])
    assert_same_bits(unpermute(rows, row_id_map, torch.ones(5, 2)).detach(), 2 * x)


@both
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("num_out", [None, -1, 0, 1, 9, 10, 14])
@pytest.mark.parametrize("ids", [EXAMPLE, EXAMPLE.masked_fill(EXAMPLE == 1, -1)])
def test_number_of_rows(pair: str, as_tensor: bool, num_out: Any, ids: Tensor) -> None:
    """Slots past it have no row; rows left over are zero, and what is in them is ignored."""
    permute, unpermute, _ = PAIRS[pair]
    num_rows = num_out if num_out is not None and num_out > 0 else 10
    slots, row_of_slot = maps_of(ids, num_rows)
    given = torch.tensor(num_out) if as_tensor and num_out is not None else num_out
    x = torch.randn(5, 4, requires_grad=True)
    rows, row_id_map = permute(x, ids, num_out_tokens=given)
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 2))
    assert_same_bits(row_id_map, expected_map(pair, slots, row_of_slot))
    empty = torch.tensor(slots) < 0
    grad = torch.randn(num_rows, 4).masked_fill(empty[:, None], math.nan)
    assert_same_bits(torch.autograd.grad(rows, x, grad)[0], combine(grad, row_of_slot))
    dirty = rows.detach().masked_fill(empty[:, None], math.nan).requires_grad_()
    probs = torch.rand(5, 2, requires_grad=True)
    out = unpermute(dirty, row_id_map, probs)
    assert_same_bits(out.detach(), combine(dirty.detach(), row_of_slot, probs.detach()))
    got = torch.autograd.grad(out, (dirty, probs), torch.ones(5, 4))
    want = combine_gradients(dirty.detach(), row_of_slot, probs.detach(), torch.ones(5, 4))
    assert_same_bits(got[0], want[0])
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)
    assert (got[1][torch.tensor(row_of_slot) < 0] == 0).all()


def test_map_b_without_probs_after_dropped_slots() -> None:
    """[K*T,H], zero for a slot without a row, although there are fewer rows."""
    x = torch.randn(5, 3)
    rows, row_id_map = xtuner.permute(x, EXAMPLE, num_out_tokens=7)
    dropped = torch.tensor(EXAMPLE_B)[:, None] >= 7
    assert_same_bits(xtuner.unpermute(rows, row_id_map), x.repeat(2, 1).masked_fill(dropped, 0))


@both
def test_number_of_experts_and_of_missing_ids(pair: str) -> None:
    """The first must agree with the ids, the second is found without being told."""
    permute = PAIRS[pair][0]
    ids = EXAMPLE.masked_fill(EXAMPLE == 0, -1)
    x = torch.randn(5, 3)
    for missing in (None, 0, 3, 99):
        rows, row_id_map = permute(x, ids, 2, 7, missing)
        slots, row_of_slot = maps_of(ids, 7)
        assert_same_bits(rows, gather(x, slots, 2))
        assert_same_bits(row_id_map, expected_map(pair, slots, row_of_slot))
    with pytest.raises(ArgumentError, match="`num_topK`"):
        permute(x, ids, num_topK=3)


@both
@pytest.mark.parametrize("num_out", [None, 2])
def test_no_tokens(pair: str, num_out: int | None) -> None:
    permute, unpermute, _ = PAIRS[pair]
    x = torch.zeros(0, 4, requires_grad=True)
    ids = torch.zeros(0, 2, dtype=torch.int32)
    probs = torch.zeros(0, 2, requires_grad=True)
    weights = torch.randn(3, 6, 4, requires_grad=True)
    rows, row_id_map = permute(x, ids, num_out_tokens=num_out)
    assert rows.shape == (num_out or 0, 4) and (rows == 0).all()
    out = xtuner.group_gemm(rows, weights, torch.zeros(3, dtype=torch.int64))
    assert out.shape == (num_out or 0, 6)
    out = unpermute(out, row_id_map, probs)
    assert out.shape == (0, 6)
    grads = torch.autograd.grad(out.sum(), (x, weights, probs))
    assert [g.shape for g in grads] == [(0, 4), (3, 6, 4), (0, 2)]
    assert (grads[1] == 0).all()


@both
@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_routed(pair: str) -> None:
    """Zeros with a graph, so that every rank of a job runs its backward."""
    permute, unpermute, _ = PAIRS[pair]
    x = torch.randn(4, 5, requires_grad=True)
    weights = torch.randn(3, 6, 5, requires_grad=True)
    probs = torch.full((4, 2), math.nan, requires_grad=True)
    rows, row_id_map = permute(x, torch.full((4, 2), -1))
    assert rows.shape == (8, 5) and (rows == 0).all() and (row_id_map == -1).all()
    out = xtuner.group_gemm(rows, weights, torch.zeros(3, dtype=torch.int64))
    out = unpermute(out, row_id_map, probs)
    assert out.shape == (4, 6) and (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), (x, weights, probs)):
        assert (grad == 0).all()


@both
def test_strided_inputs_and_expanded_gradients(pair: str) -> None:
    permute, unpermute, _ = PAIRS[pair]
    ids = random_ids(2, 12, [-1, 0, 1, 4]).t()
    slots, row_of_slot = maps_of(ids)
    x = torch.randn(12, 10)[:, 1:9:2].requires_grad_()
    rows, row_id_map = permute(x, ids)
    assert_same_bits(rows.detach(), gather(x.detach(), slots, 2))
    (d_x,) = torch.autograd.grad(rows.sum(), x)
    assert_same_bits(d_x, (ids >= 0).sum(1, keepdim=True).float().expand(12, 4))
    rows = torch.randn(4, 24).t()[:, ::2].requires_grad_()
    probs = torch.rand(2, 12).t().requires_grad_()
    every_other = torch.stack([row_id_map, row_id_map], 1)[:, 0]
    out = unpermute(rows, every_other, probs)
    assert_same_bits(out.detach(), combine(rows.detach(), row_of_slot, probs.detach()))
    got = torch.autograd.grad(out.sum(), (rows, probs))
    want = combine_gradients(rows.detach(), row_of_slot, probs.detach(), torch.ones(12, 2))
    assert_same_bits(got[0], want[0])
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)
    assert_same_bits(permute(x[:1].expand(12, 4), ids)[0], gather(x[:1].expand(12, 4), slots, 2))


TORCH_PAIR = "cuda_token_permute_torch goes with cuda_token_unpermute_torch"
CUDA_PAIR = "permute or cuda_token_permute goes with unpermute or cuda_token_unpermute"


def test_the_unpermute_of_the_other_pair_names_the_right_one() -> None:
    x, probs = torch.randn(5, 3), torch.rand(5, 2)
    rows, map_b = xtuner.permute(x, EXAMPLE)
    few, few_b = xtuner.permute(x, EXAMPLE, num_out_tokens=7)
    _, map_a = xtuner.cuda_token_permute_torch(x, EXAMPLE)
    _, few_a = xtuner.cuda_token_permute_torch(x, EXAMPLE, num_out_tokens=7)
    more, more_a = xtuner.cuda_token_permute_torch(x, EXAMPLE, num_out_tokens=12)
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        (TORCH_PAIR, xtuner.unpermute, (rows, map_a, probs)),
        (TORCH_PAIR, xtuner.cuda_token_unpermute, (rows, map_a)),
        (CUDA_PAIR, xtuner.cuda_token_unpermute_torch, (rows, map_b, probs)),
        (CUDA_PAIR, xtuner.cuda_token_unpermute_torch, (rows, map_b)),
        # cast to the other's dtype: by length, or by entries out of range
        (TORCH_PAIR, xtuner.unpermute, (more, more_a.int(), probs)),
        (TORCH_PAIR, xtuner.unpermute, (few, few_a.int())),
        (CUDA_PAIR, xtuner.cuda_token_unpermute_torch, (few, few_b.long(), probs)),
    ]
    for message, function, arguments in calls:
        with pytest.raises(ArgumentError, match=f"`row_id_map`.*{message}"):
            function(*arguments)


SIZES = {"some": [3, 0, 5], "all": [0, 4, 9], "none": [0, 0, 0], "one": [0, 13, 0]}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("size_dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grouped_gemms(dtype: torch.dtype, case: str, size_dtype: torch.dtype) -> None:
    """Empty experts, and rows past the last expert, which are zero and not read."""
    sizes = SIZES[case]
    given, used = torch.tensor(sizes, dtype=size_dtype), sum(sizes)
    x, weights = integers(13, 8, dtype=dtype), integers(3, 6, 8, dtype=dtype)
    grad = integers(13, 6, dtype=dtype)
    x[used:] = grad[used:] = math.nan
    x.requires_grad_(), weights.requires_grad_()
    swapped = weights.detach().transpose(1, 2).contiguous().requires_grad_()
    want = multiply(x.detach(), swapped.detach(), sizes)
    want_x = multiply(grad, weights.detach(), sizes)
    want_w = multiply_transposed(grad, x.detach(), sizes)
    for out, matrix, want_matrix in (
        (xtuner.group_gemm(x, weights, given), weights, want_w),
        (xtuner.m_grouped_gemm(x, weights, given, trans_b=True), weights, want_w),
        (xtuner.m_grouped_gemm(x, swapped, given), swapped, want_w.transpose(1, 2)),
    ):
        got = (out, *torch.autograd.grad(out, (x, matrix), grad))
        for result, expected in zip(got, (want, want_x, want_matrix)):
            assert result.dtype == dtype and torch.equal(result, expected)

    a, b = grad.requires_grad_(), x.detach().requires_grad_()
    product = xtuner.k_grouped_gemm(a, b, given)
    assert product.dtype == dtype and torch.equal(product, want_w)
    d_product = integers(3, 6, 8, dtype=dtype)
    d_a, d_b = torch.autograd.grad(product, (a, b), d_product)
    assert torch.equal(d_a, multiply(b.detach(), d_product.transpose(1, 2), sizes))
    assert torch.equal(d_b, multiply(a.detach(), d_product, sizes))


@pytest.mark.parametrize("dtype", FLOATS)
def test_grouped_gemms_of_strided_operands_and_expanded_gradients(dtype: torch.dtype) -> None:
    """A chunk of wider rows, transposed weights, an odd hidden size."""
    sizes = torch.tensor([4, 3])
    x = integers(7, 10, dtype=dtype)[:, 5:].requires_grad_()
    weights = integers(2, 5, 3, dtype=dtype).transpose(1, 2).requires_grad_()
    ones = torch.ones(7, 3, dtype=dtype)
    want = multiply(x.detach(), weights.detach().transpose(1, 2), [4, 3])
    out = xtuner.group_gemm(x, weights, sizes)
    assert torch.equal(out, want)
    d_x, d_weights = torch.autograd.grad(out.sum(), (x, weights))
    assert torch.equal(d_x, multiply(ones, weights.detach(), [4, 3]))
    assert torch.equal(d_weights, multiply_transposed(ones, x.detach(), [4, 3]))
    b = integers(3, 7, dtype=dtype).t()
    product = xtuner.k_grouped_gemm(x, b, sizes)
    assert torch.equal(product, multiply_transposed(x.detach(), b, [4, 3]))
    (d_x,) = torch.autograd.grad(product.sum(), x)
    assert torch.equal(d_x, b.sum(1, keepdim=True).expand(7, 5))


def test_gradients_by_finite_differences() -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    ids, sizes = random_ids(5, 2, [-1, 0, 1]), torch.tensor([3, 0, 4])
    for permute, unpermute, _ in PAIRS.values():
        _, row_id_map = permute(torch.zeros(5, 3), ids, None, 8)
        assert gradcheck(lambda a, f=permute: f(a, ids, None, 8)[0], random(5, 3))
        arguments = (random(8, 3), random(5, 2))
        assert gradcheck(lambda a, p, f=unpermute, m=row_id_map: f(a, m, p), arguments)
    _, row_id_map = xtuner.permute(torch.zeros(5, 3), EXAMPLE)
    assert gradcheck(lambda a: xtuner.unpermute(a, row_id_map), random(10, 3))
    assert gradcheck(lambda a, w: xtuner.group_gemm(a, w, sizes), (random(8, 2), random(3, 4, 2)))
    assert gradcheck(
        lambda a, w: xtuner.m_grouped_gemm(a, w, sizes), (random(8, 2), random(3, 2, 4))
    )
    assert gradcheck(lambda a, b: xtuner.k_grouped_gemm(a, b, sizes), (random(8, 2), random(8, 3)))


def moe(pair: str, x: Tensor, ids: Tensor, weights: Tensor, sizes: Tensor, probs: Tensor) -> Any:
    permute, unpermute, _ = PAIRS[pair]
    rows, row_id_map = permute(x, ids)
    hidden = xtuner.group_gemm(rows, weights, sizes)
    return unpermute(hidden, row_id_map, probs), xtuner.k_grouped_gemm(hidden, rows, sizes)


@both
def test_compiles_as_one_graph(pair: str) -> None:
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 8):
        ids = random_ids(num_tokens, 2, [0, 1, 3], True)
        inputs = [torch.randn(num_tokens, 4), torch.randn(4, 6, 4), torch.rand(num_tokens, 2)]
        x, weights, probs = (value.requires_grad_() for value in inputs)
        sizes = torch.bincount(ids.flatten(), minlength=4)
        got = compiled(pair, x, ids, weights, sizes, probs)
        want = moe(pair, x, ids, weights, sizes, probs)
        grads = [torch.randn(num_tokens, 6), torch.randn(4, 6, 4)]
        got = (*got, *torch.autograd.grad(got, (x, weights, probs), grads))
        want = (*want, *torch.autograd.grad(want, (x, weights, probs), grads))
        for result, expected in zip(got, want):
            torch.testing.assert_close(result, expected)


def test_autocast() -> None:
    """The GEMMs follow it, in both operands; the moves keep the dtype of the rows."""
    bf16 = torch.bfloat16
    x, weights = torch.randn(6, 4, requires_grad=True), torch.randn(2, 3, 4, dtype=torch.float16)
    sizes, probs = torch.tensor([4, 2]), torch.rand(6, 1)
    with torch.autocast("cpu", bf16):
        rows, row_id_map = xtuner.permute(x, torch.tensor([1, 0, 0, 1, 0, 0]))
        out = xtuner.group_gemm(rows, weights, sizes)
        combined = xtuner.unpermute(out, row_id_map, probs)
        product = xtuner.k_grouped_gemm(out, rows, sizes)
    assert [t.dtype for t in (rows, out, combined, product)] == [torch.float32, bf16, bf16, bf16]
    assert_same_bits(out, xtuner.group_gemm(rows.to(bf16), weights.to(bf16), sizes))
    assert_same_bits(product, xtuner.k_grouped_gemm(out, rows.to(bf16), sizes))
    assert torch.autograd.grad(combined.sum() + product.sum(), x)[0].dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    x, probs, weights = torch.randn(5, 3), torch.rand(5, 2), torch.randn(2, 4, 3)
    rows, row_id_map = xtuner.permute(x, EXAMPLE)
    map_a = torch.tensor(EXAMPLE_A)
    gemm, m_gemm, k_gemm = xtuner.group_gemm, xtuner.m_grouped_gemm, xtuner.k_grouped_gemm
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("input_act", xtuner.permute, (x[:4], EXAMPLE)),
        ("indices", xtuner.permute, (x, EXAMPLE.float())),
        ("indices", xtuner.cuda_token_permute_torch, (x, EXAMPLE[None])),
        ("num_out_tokens", xtuner.permute, (x, EXAMPLE, 2, torch.tensor([7]))),
        ("input_act", xtuner.unpermute, (rows.int(), row_id_map)),
        ("row_id_map", xtuner.unpermute, (rows, row_id_map[:8], probs)),
        ("row_id_map", xtuner.unpermute, (rows[:9], row_id_map, probs)),
        ("probs", xtuner.unpermute, (rows, row_id_map, probs.long())),
        ("row_id_map", xtuner.cuda_token_unpermute_torch, (rows, map_a[:9], probs)),
        ("row_id_map", xtuner.cuda_token_unpermute_torch, (rows, map_a, probs[:4])),
        ("split_sizes", gemm, (rows, weights, torch.tensor([6, 5]))),
        ("split_sizes", gemm, (rows, weights, torch.tensor([11, -1]))),
        ("split_sizes", gemm, (rows, weights, torch.tensor([5.0, 5.0]))),
        ("weights", gemm, (rows, weights, torch.tensor([3, 3, 4]))),
        ("weights", gemm, (rows, weights.double(), torch.tensor([5, 5]))),
        ("B", m_gemm, (rows, weights, torch.tensor([5, 5]))),
        ("size_per_group", m_gemm, (rows, weights, torch.tensor([6, 5]), True)),
        ("size_per_group", k_gemm, (rows, rows, torch.tensor([6, 5]))),
        ("B", k_gemm, (rows, rows[:9], torch.tensor([5, 5]))),
        ("B", k_gemm, (rows, rows.double(), torch.tensor([5, 5]))),
    ]
    for argument, function, arguments in calls:
        message = rf"tokenyard\.compat\.xtuner\.\w+: {re.escape(f'`{argument}`')}"
        with pytest.raises(ArgumentError, match=message):
            function(*arguments)
