"""The drop-in for TransformerEngine's permutation and router, against loops over the documented rules."""

import math
import random
import re
from typing import Any

import pytest
import torch
from cases import assert_same_bits, wide
from mask_maps import listed, mask_map_of, pairs_of, random_mask
from torch import Tensor
from torch.autograd import gradcheck

from tokenyard import ArgumentError
from tokenyard.compat import transformer_engine as te

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MASK_DTYPES = [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
EXAMPLE = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
# the hidden sizes of the published shapes, divided by 256, so that a CPU takes seconds
SHAPES = [(4096, 7, 16, 2), (4096, 16, 16, 5), (4096, 7, 16, 5), (4096, 16, 16, 2)]
PADDED = [(4096, 8, 5, 2), (4096, 64, 16, 6), (1024, 256, 28, 6), (512, 512, 36, 8)]


def dense_permute(x: Tensor, mask: Tensor) -> Tensor:
    return x[[token for token, _ in pairs_of(mask)]]


def dense_unpermute(rows: Tensor, mask: Tensor, probs: Tensor | None = None) -> Tensor:
    """The sum of each token's rows in fp64, whatever the order."""
    pairs = pairs_of(mask)
    tokens = torch.tensor([token for token, _ in pairs], dtype=torch.int64)
    terms = rows.double()
    if probs is not None:
        terms = (
            terms
            * probs.double()[mask.bool().t().nonzero()[:, 1], mask.bool().t().nonzero()[:, 0]][
                :, None
            ]
        )
    return torch.zeros(mask.shape[0], rows.shape[1], dtype=torch.float64).index_add(
        0, tokens, terms
    )


def chain(rows: list[Tensor], weights: list[Tensor] | None, dtype: torch.dtype) -> Tensor:
    """A sum from zero in fp32 in the order given, each product rounded, rounded once to `dtype`."""
    total = torch.zeros(rows[0].shape, dtype=torch.float32)
    for k, row in enumerate(rows):
        term = row.float()
        if weights is not None:
            term = term * weights[k].float()
        total = total + term
    return total.to(dtype)


def close(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[got.dtype] * scale
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mask_round_trip_with_gradients(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_tokens, num_experts, hidden, top_k = shape
    mask = random_mask(num_tokens, num_experts, num_tokens * top_k)
    x = torch.randn(num_tokens, hidden).to(dtype).requires_grad_()
    probs = torch.rand(num_tokens, num_experts).to(dtype).requires_grad_()
    rows, row_id_map = te.moe_permute(x, mask, num_out_tokens=num_tokens * top_k, map_type="mask")
    assert_same_bits(rows.detach(), dense_permute(x.detach(), mask))
    assert (row_id_map.dtype, row_id_map.shape) == (torch.int32, (num_tokens, 2 * num_experts + 1))
    assert listed(row_id_map) == mask_map_of(mask)

    grad = torch.randn(rows.shape).to(dtype)
    (d_x,) = torch.autograd.grad(rows, x, grad)
    close(d_x, dense_unpermute(grad, mask), 4)

    rows = rows.detach().requires_grad_()
    out = te.moe_unpermute(rows, row_id_map, merging_probs=probs, restore_shape=x.shape)
    close(out.detach(), dense_unpermute(rows.detach(), mask, probs.detach()), 4)
    grad = torch.randn(out.shape).to(dtype)
    d_rows, d_probs = torch.autograd.grad(out, (rows, probs), grad)
    tokens, experts = (torch.tensor(ids) for ids in zip(*pairs_of(mask)))
    products = grad[tokens].float() * probs.detach()[tokens, experts][:, None].float()
    assert_same_bits(d_rows, products.to(dtype))
    want = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    want[tokens, experts] = (grad[tokens].double() * rows.detach().double()).sum(1)
    assert (d_probs.dtype, d_probs.shape) == (dtype, probs.shape)
    assert (d_probs[~mask.bool()] == 0).all()
    close(d_probs, want, 20)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_mask_map_adds_up_by_descending_expert(dtype: torch.dtype, weighted: bool) -> None:
    mask = random_mask(64, 9, 64 * 4)
    rows, probs = wide(256, 8, dtype=dtype), torch.rand(64, 9)
    _, row_id_map = te.moe_permute(torch.zeros(64, 8), mask, 256)
    out = te.moe_unpermute(rows, row_id_map, probs if weighted else None)
    for token, entries in enumerate(mask_map_of(mask)):
        if not entries:
            assert (out[token] == 0).all()
            continue
        weights = [probs[token, expert] for _, expert in entries]
        want = chain([rows[row] for row, _ in entries], weights if weighted else None, dtype)
        assert_same_bits(out[token], want)


@pytest.mark.parametrize("dtype", MASK_DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset"])
def test_masks_of_any_dtype_and_strides(dtype: torch.dtype, layout: str) -> None:
    mask = random_mask(33, 6, 70).to(dtype)
    given = {
        "contiguous": mask,
        "transposed": mask.t().contiguous().t(),
        "strided": torch.stack([mask, 1 - mask.int()], dim=2).to(dtype)[:, :, 0],
        "offset": torch.cat([mask[:1], mask])[1:],
    }[layout]
    x = torch.randn(33, 5)
    rows, row_id_map = te.moe_permute(x, given, 70)
    assert_same_bits(rows, dense_permute(x, mask))
    assert listed(row_id_map) == mask_map_of(mask)


@pytest.mark.parametrize("prob_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permute_with_probs(dtype: torch.dtype, prob_dtype: torch.dtype) -> None:
    mask = random_mask(300, 7, 700)
    x = torch.randn(300, 9).to(dtype).requires_grad_()
    probs = (torch.rand(300, 7) + 0.1).to(prob_dtype)
    probs[~mask.bool()] = random.choice([math.nan, math.inf])
    probs.requires_grad_()
    rows, permuted_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=700)
    assert_same_bits(rows.detach(), dense_permute(x.detach(), mask))
    pairs = pairs_of(mask)
    want = torch.stack([probs.detach()[token, expert] for token, expert in pairs])
    assert_same_bits(permuted_probs.detach(), want)
    assert listed(row_id_map) == mask_map_of(mask)
    grad, grad_probs = torch.randn(700, 9).to(dtype), torch.randn(700).to(prob_dtype)
    d_x, d_probs = torch.autograd.grad((rows, permuted_probs), (x, probs), (grad, grad_probs))
    close(d_x, dense_unpermute(grad, mask), 4)
    want = torch.zeros(300, 7, dtype=prob_dtype)
    for row, (token, expert) in enumerate(pairs):
        want[token, expert] = grad_probs[row]
    assert_same_bits(d_probs, want)


def test_probability_zero_gives_a_zero_row() -> None:
    """The mark of padding; the row is a constant, so the token gets no gradient from it."""
    x = torch.randn(5, 4)
    x[3] = math.nan
    x.requires_grad_()
    probs = torch.rand(5, 3) + 0.5
    probs[3, 0], probs[3, 1], probs[1, 2] = 0.0, -0.0, 0.0
    probs.requires_grad_()
    rows, permuted_probs, row_id_map = te.moe_permute_with_probs(x, probs, EXAMPLE, 12)
    zero = [row for row, pair in enumerate(pairs_of(EXAMPLE)) if probs[pair] == 0]
    assert zero == [2, 5, 7]
    assert (rows[zero] == 0).all() and (rows[10:] == 0).all()
    assert listed(row_id_map) == mask_map_of(EXAMPLE)
    grad = torch.ones(12, 4)
    d_x, d_probs = torch.autograd.grad(
        (rows, permuted_probs), (x, probs), (grad, torch.arange(1.0, 13.0))
    )
    assert d_x[:, 0].tolist() == [2, 1, 2, 0, 2]
    assert d_probs[3].tolist() == [3, 6, 0]
    assert permuted_probs[10:].tolist() == [0, 0]


@pytest.mark.parametrize("weighted", [False, True])
def test_nan_among_unrouted_probabilities_does_not_leak(weighted: bool) -> None:
    mask = random_mask(20, 5, 37)
    probs = torch.rand(20, 5)
    probs[~mask.bool()] = math.nan
    probs.requires_grad_()
    rows = torch.randn(37, 4, requires_grad=True)
    _, row_id_map = te.moe_permute(torch.zeros(20, 4), mask, 37)
    out = te.moe_unpermute(rows, row_id_map, merging_probs=probs, restore_shape=(20, 4))
    d_rows, d_probs = torch.autograd.grad(out.sum(), (rows, probs))
    for result in (out, d_rows, d_probs):
        assert result.isfinite().all()
    assert (d_probs[~mask.bool()] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", PADDED)
def test_permute_and_pad(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_experts, hidden, top_k = shape
    mask = random_mask(num_tokens, num_experts, num_tokens * top_k)
    mask[:, num_experts // 2] = 0  # an empty expert
    counts = mask.sum(0)
    x = torch.randn(num_tokens, hidden).to(dtype).requires_grad_()
    probs = (torch.rand(num_tokens, num_experts) + 0.1).requires_grad_()
    rows, permuted_probs, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(
        x, probs, mask, counts, 16
    )
    assert pad_offsets is not None
    want_target = [-(-count // 16) * 16 for count in counts.tolist()]
    assert target.dtype == torch.int64
    assert target.tolist() == want_target
    tokens, experts = [], []
    for expert in range(num_experts):
        own = mask[:, expert].nonzero().flatten().tolist()
        tokens += own + [-1] * (want_target[expert] - len(own))
        experts += [expert] * want_target[expert]
    valid = torch.tensor(tokens) >= 0
    want = x.detach()[tokens].masked_fill(~valid[:, None], 0)
    assert_same_bits(rows.detach(), want)
    want_probs = probs.detach()[tokens, experts].masked_fill(~valid, 0)
    assert_same_bits(permuted_probs.detach(), want_probs)
    before, offsets = 0, []
    for expert in range(num_experts):
        offsets.append(before)
        before += want_target[expert] - int(counts[expert])
    assert pad_offsets.tolist() == offsets
    assert listed(row_id_map) == mask_map_of(mask)

    grad, grad_probs = torch.randn(rows.shape).to(dtype), torch.randn(permuted_probs.shape)
    d_x, d_probs = torch.autograd.grad((rows, permuted_probs), (x, probs), (grad, grad_probs))
    close(d_x, dense_unpermute(grad[valid], mask), 4)
    want_d = torch.zeros_like(probs)
    want_d[torch.tensor(tokens)[valid], torch.tensor(experts)[valid]] = grad_probs[valid]
    assert_same_bits(d_probs, want_d)

    dirty = rows.detach().masked_fill(~valid[:, None], math.nan).requires_grad_()
    out = te.moe_unpermute(
        dirty, row_id_map, merging_probs=probs, restore_shape=x.shape, pad_offsets=pad_offsets
    )
    close(out.detach(), dense_unpermute(rows.detach()[valid], mask, probs.detach()), 4)
    d_rows, d_probs = torch.autograd.grad(out, (dirty, probs), torch.ones_like(out))
    assert (d_rows[~valid] == 0).all()
    assert (d_probs[~mask.bool()] == 0).all() and d_probs.isfinite().all()
    close(d_rows[valid], probs.detach()[tokens, experts][valid][:, None].expand(-1, hidden))


def test_nothing_to_pad() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 0, 1], [1, 0, 0], [1, 0, 0]])
    x, probs = torch.randn(4, 3), torch.rand(4, 3)
    results = te.moe_permute_and_pad_with_probs(x, probs, mask, torch.tensor([4, 0, 2]), 2)
    assert results[3] is None
    assert results[4].tolist() == [4, 0, 2]
    assert_same_bits(results[0], x[[0, 1, 2, 3, 0, 1]])
    out = te.moe_unpermute(results[0], results[2], restore_shape=(4, 3), pad_offsets=results[3])
    torch.testing.assert_close(out, x * mask.sum(1, keepdim=True))


def test_padding_is_computed_in_integers() -> None:
    mask = torch.ones(4097, 1, dtype=torch.bool)
    counts = torch.tensor([4097], dtype=torch.int32)
    *_, target = te.moe_permute_and_pad_with_probs(
        torch.zeros(4097, 1), torch.rand(4097, 1), mask, counts, 16
    )
    assert target.tolist() == [4112]


@pytest.mark.parametrize("num_experts", [1, 3])
def test_every_expert_and_one_expert(num_experts: int) -> None:
    x = torch.randn(6, 4)
    mask = torch.ones(6, num_experts, dtype=torch.int8)
    rows, row_id_map = te.moe_permute(x, mask, 6 * num_experts)
    assert_same_bits(rows, x.repeat(num_experts, 1))
    torch.testing.assert_close(te.moe_unpermute(rows, row_id_map), num_experts * x)


@pytest.mark.parametrize("bound", [6, 2**31 - 1])
def test_undefined_cells_are_not_read(bound: int) -> None:
    """The peer's own map has anything in them, also what looks like an entry."""
    mask = random_mask(40, 6, 90)
    rows, probs = torch.randn(90, 3), torch.rand(40, 6)
    _, row_id_map = te.moe_permute(torch.zeros(40, 3), mask, 90)
    want = te.moe_unpermute(rows, row_id_map, probs)
    dirty = row_id_map.clone()
    unwritten = torch.arange(6)[None, :] >= dirty[:, -1:]
    for part in (dirty[:, :6], dirty[:, 6:12]):
        part[unwritten] = torch.randint(-bound, bound, (int(unwritten.sum()),)).int()
    assert_same_bits(te.moe_unpermute(rows, dirty, probs), want)
    offsets = torch.zeros(6, dtype=torch.int64)
    assert_same_bits(te.moe_unpermute(rows, dirty, probs, pad_offsets=offsets), want)


@pytest.mark.parametrize("topk", [2, 3, 6, 9])
def test_topk_bounds_the_maps(topk: int) -> None:
    """A bound that holds changes nothing."""
    ids = torch.rand(50, 6).argsort(dim=1)[:, :2]
    mask = torch.zeros(50, 6, dtype=torch.bool).scatter(1, ids, True)
    x, probs = torch.randn(50, 3), torch.rand(50, 6)
    bounded = te.moe_permute_with_probs(x, probs, mask, 100, topk=topk)
    for got, want in zip(bounded, te.moe_permute_with_probs(x, probs, mask, 100)):
        assert_same_bits(got, want)
    rows, _, row_id_map = bounded
    assert_same_bits(
        te.moe_unpermute(rows, row_id_map, probs, topk=topk),
        te.moe_unpermute(rows, row_id_map, probs),
    )
    counts = mask.sum(0)
    padded = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16, topk=topk)
    want = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
    for got, expected in zip(padded, want):
        assert got is not None and expected is not None
        assert_same_bits(got, expected)


def test_deprecated_name_of_the_probabilities() -> None:
    rows, row_id_map = te.moe_permute(torch.randn(5, 3), EXAMPLE, 10)
    probs = torch.rand(5, 3)
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        out = te.moe_unpermute(rows, row_id_map, probs=probs)
    assert_same_bits(out, te.moe_unpermute(rows, row_id_map, merging_probs=probs))
    with pytest.raises(ArgumentError, match="probs"):
        te.moe_unpermute(rows, row_id_map, merging_probs=probs, probs=probs)


def test_strided_inputs_and_expanded_gradients() -> None:
    mask = random_mask(12, 4, 25)
    x = torch.randn(12, 10)[:, 1:9:2].requires_grad_()
    probs = torch.rand(4, 12).t().requires_grad_()
    rows, permuted_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask, 25)
    assert_same_bits(rows.detach(), dense_permute(x.detach(), mask))
    out = te.moe_unpermute(rows, row_id_map, merging_probs=probs)
    d_x, d_probs = torch.autograd.grad(out.sum() + permuted_probs.sum(), (x, probs))
    routed = probs.detach() * mask
    torch.testing.assert_close(d_x, routed.sum(1, keepdim=True).expand(12, 4))
    torch.testing.assert_close(d_probs, (x.detach().sum(1, keepdim=True) + 1) * mask)


def test_gradients_by_finite_differences() -> None:
    mask = random_mask(6, 4, 11)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    probs = (torch.rand(6, 4, dtype=torch.float64) + 0.5).requires_grad_()
    _, _, row_id_map = te.moe_permute_with_probs(x, probs, mask, 9)
    rows = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a, b: te.moe_permute_with_probs(a, b, mask, 9)[:2], (x, probs))
    assert gradcheck(lambda a, b: te.moe_unpermute(a, row_id_map, b, (6, 3)), (rows, probs))
    split, order = torch.tensor([2, 3, 1]), torch.tensor([2, 0, 1])
    values = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda a, b: te.moe_sort_chunks_by_index_with_probs(a, b, split, order), (rows, values)
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_sort_chunks(dtype: torch.dtype) -> None:
    """Rows past the sum of the splits stay where they are; chunks may be empty."""
    sizes, order = [4, 0, 7, 3], [2, 3, 0, 1]
    x = torch.randn(16, 5).to(dtype).requires_grad_()
    probs = torch.rand(16, requires_grad=True)
    where = [*range(4, 11), *range(11, 14), *range(4), 14, 15]
    splits, index = torch.tensor(sizes, dtype=torch.int32), torch.tensor(order, dtype=torch.int32)
    out = te.moe_sort_chunks_by_index(x, splits, index)
    assert_same_bits(out.detach(), x.detach()[where])
    out, permuted_probs = te.moe_sort_chunks_by_index_with_probs(x, probs, splits, index)
    assert_same_bits(out.detach(), x.detach()[where])
    assert_same_bits(permuted_probs.detach(), probs.detach()[where])
    grad, grad_probs = torch.randn(16, 5).to(dtype), torch.randn(16)
    d_x, d_probs = torch.autograd.grad((out, permuted_probs), (x, probs), (grad, grad_probs))
    assert_same_bits(d_x[where], grad)
    assert_same_bits(d_probs[where], grad_probs)


def test_bad_arguments_are_named() -> None:
    x, probs = torch.randn(5, 3), torch.rand(5, 3)
    rows, row_id_map = te.moe_permute(x, EXAMPLE, 10)
    calls: list[tuple[str, Any]] = [
        ("map_type", lambda: te.moe_permute(x, EXAMPLE, 10, map_type="dense")),  # type: ignore[arg-type]
        ("inp", lambda: te.moe_permute(x[:4], EXAMPLE, 10)),
        ("inp", lambda: te.moe_permute(x[:4], EXAMPLE[:, :2], 10, map_type="index")),
        ("inp", lambda: te.moe_permute_with_probs(x[:4], probs, EXAMPLE, 10)),
        (
            "inp",
            lambda: te.moe_permute_and_pad_with_probs(x[:4], probs, EXAMPLE, EXAMPLE.sum(0), 2),
        ),
        ("routing_map.shape[1]", lambda: te.moe_permute(x, EXAMPLE[:, :0], 10, map_type="index")),
        ("probs", lambda: te.moe_permute_with_probs(x, probs[:, :2], EXAMPLE, 10)),
        ("merging_probs", lambda: te.moe_unpermute(rows, row_id_map, probs[:4])),
        ("row_id_map", lambda: te.moe_unpermute(rows, row_id_map[:, :6])),
        ("restore_shape", lambda: te.moe_unpermute(rows, row_id_map, None, (10, 3))),
        (
            "align_size",
            lambda: te.moe_permute_and_pad_with_probs(x, probs, EXAMPLE, EXAMPLE.sum(0), 0),
        ),
    ]
    for argument, call in calls:
        with pytest.raises(ArgumentError, match=re.escape(f"`{argument}`")):
            call()
