"""The drop-in for Megatron-Core's moves, against loops over the documented rules."""

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_same_bits, nearest_fp32, rounded, wide
from torch import Tensor
from torch.autograd import gradcheck

from tokenyard import ArgumentError
from tokenyard.compat import megatron, transformer_engine

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
EXAMPLE = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
PRECISIONS = ("fp32", "fp64")


def fixed_mask(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    ids = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, ids, True)


def pairs_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, experts) of the rows in order."""
    experts, tokens = mask.t().nonzero(as_tuple=True)
    return tokens, experts


def inverse_map_of(mask: Tensor) -> Tensor:
    """By the peer's arguments, from a mask of fixed fan-out."""
    tokens, experts = pairs_of(mask)
    flat_sorted = experts * mask.shape[0] + tokens
    return megatron.build_inverse_permutation_map(mask, flat_sorted, tokens, tokens.shape[0])


def tree(
    rows: list[list[float]],
    experts: list[int],
    weights: list[float] | None,
    experts_per_rank: int,
    ep_size: int,
    within: str,
    across: str,
    dtype: torch.dtype,
) -> list[float]:
    """The summation tree of one token in NumPy scalars; slots in ascending expert id."""
    chain, total_type = (np.float64 if p == "fp64" else np.float32 for p in (within, across))
    results = []
    for column in range(len(rows[0])):
        total = total_type(0)
        for rank in range(ep_size):
            partial = chain(0)
            for k, expert in enumerate(experts):
                if expert // experts_per_rank == rank:
                    term = np.float32(rows[k][column])
                    if weights is not None:
                        term = term * np.float32(weights[k])
                    partial = partial + chain(term)
            total = total + total_type(np.float32(partial))
        results.append(rounded(float(np.float32(total)), dtype))
    return results


def test_inverse_map() -> None:
    inverse_map = inverse_map_of(EXAMPLE)
    assert inverse_map.dtype == torch.int64
    assert inverse_map[0].tolist() == [[0, 3], [1, 7], [4, 8], [2, 5], [6, 9]]
    assert inverse_map[1].tolist() == [[0, 1], [0, 2], [1, 2], [0, 1], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.int64])
def test_inverse_map_of_random_masks(dtype: torch.dtype) -> None:
    mask = fixed_mask(37, 12, 5)
    tokens, experts = pairs_of(mask)
    want = torch.full((2, 37, 5), -1)
    filled = [0] * 37
    for row, (token, expert) in enumerate(zip(tokens.tolist(), experts.tolist())):
        want[:, token, filled[token]] = torch.tensor([row, expert])
        filled[token] += 1
    got = megatron.build_inverse_permutation_map(
        mask.to(dtype), (experts * 37 + tokens).int(), tokens.int(), num_out_tokens=37 * 5
    )
    assert_same_bits(got, want)


def test_inverse_map_without_tokens_or_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    inverse_map = megatron.build_inverse_permutation_map(torch.zeros(0, 4), none, none, 0)
    assert inverse_map.shape[:2] == (2, 0)
    rows, probs = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, 4, requires_grad=True)
    out = megatron.unpermute(rows, (0, 3), probs=probs, num_experts=4, inverse_map=inverse_map)
    assert out.shape == (0, 3)
    assert torch.autograd.grad(out.sum(), rows)[0].shape == (0, 3)
    inverse_map = megatron.build_inverse_permutation_map(torch.zeros(2, 4), none, none, 0)
    rows = torch.zeros(0, 3, requires_grad=True)
    out = megatron.unpermute(rows, (2, 3), probs=None, num_experts=4, inverse_map=inverse_map)
    assert out.tolist() == [[0] * 3] * 2
    assert torch.autograd.grad(out.sum(), rows)[0].shape == (0, 3)


def test_inverse_map_needs_a_fixed_fan_out() -> None:
    tokens = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="num_out_tokens"):
        megatron.build_inverse_permutation_map(EXAMPLE, tokens, tokens, 9)


@pytest.mark.parametrize(("ep_size", "want"), [(1, 1.0), (2, 0.0), (4, 1.0)])
@pytest.mark.parametrize("function", [megatron.unpermute, megatron.unpermute_loop])
def test_check_value_of_the_tree(function: Any, ep_size: int, want: float) -> None:
    """1e20 + 1 - 1e20 + 1 tells how the additions are grouped."""
    rows = torch.tensor([[1e20], [1.0], [-1e20], [1.0]])
    inverse_map = torch.tensor([[[0, 1, 2, 3]], [[0, 1, 2, 3]]])
    arguments: dict[str, Any] = {"num_experts": 4, "inverse_map": inverse_map, "ep_size": ep_size}
    for probs in (None, torch.ones(1, 4)):
        assert function(rows, (1, 1), probs=probs, **arguments).item() == want
    exact = function(rows, (1, 1), probs=None, within_rank="fp64", **arguments)
    assert exact.item() == {1: 1.0, 2: 0.0, 4: 1.0}[ep_size]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ep_size", [1, 2, 4, 12])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("within", PRECISIONS)
@pytest.mark.parametrize("across", PRECISIONS)
def test_tree(ep_size: int, weighted: bool, within: Any, across: Any, dtype: torch.dtype) -> None:
    mask = fixed_mask(9, 12, 6)
    inverse_map = inverse_map_of(mask)
    rows = wide(54, 4, dtype=dtype).requires_grad_()
    probs = torch.rand(9, 12)
    probs[~mask] = math.nan
    probs.requires_grad_()
    arguments: dict[str, Any] = {
        "probs": probs if weighted else None,
        "num_experts": 12,
        "inverse_map": inverse_map,
        "ep_size": ep_size,
        "within_rank": within,
        "across_ranks": across,
    }
    out = megatron.unpermute(rows, torch.Size((9, 4)), **arguments)
    loop = megatron.unpermute_loop(rows, torch.Size((9, 4)), **arguments)
    assert_same_bits(out.detach(), loop.detach())
    for token in range(9):
        of_slot, experts = inverse_map[:, token].tolist()
        weights = probs[token, experts].tolist() if weighted else None
        values = rows.detach()[of_slot].tolist()
        want = tree(values, experts, weights, 12 // ep_size, ep_size, within, across, dtype)
        assert out[token].tolist() == want
    inputs = [rows, probs] if weighted else [rows]
    grad = torch.randn(out.shape).to(dtype)
    results = torch.autograd.grad(out, inputs, grad)
    wants = torch.autograd.grad(loop, inputs, grad)
    assert_same_bits(results[0], wants[0])
    if weighted:
        torch.testing.assert_close(results[1], wants[1], rtol=1e-5, atol=1e-5)
        assert (results[1][~mask] == 0).all()


def test_tree_with_padding_rows_and_missing_slots() -> None:
    """Rows that no slot names may hold NaN, wherever they are."""
    rows = torch.tensor([[1.0], [math.nan], [2.0], [math.nan], [4.0], [math.nan]])
    inverse_map = torch.tensor([[[0, 4], [2, -1]], [[0, 3], [0, -1]]])
    rows.requires_grad_()
    out = megatron.unpermute(rows, (2, 1), probs=None, num_experts=4, inverse_map=inverse_map)
    assert out.flatten().tolist() == [5, 2]
    (d_rows,) = torch.autograd.grad(out, rows, torch.tensor([[3.0], [7.0]]))
    assert d_rows.flatten().tolist() == [3, 0, 7, 0, 3, 0]


def test_tree_gradients_by_finite_differences() -> None:
    mask = fixed_mask(4, 6, 2)
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    inverse_map = inverse_map_of(mask)
    for function in (megatron.unpermute, megatron.unpermute_loop):
        assert gradcheck(
            lambda r, p, f=function: f(
                r, (4, 3), probs=p, num_experts=6, inverse_map=inverse_map, ep_size=3
            ),
            (rows, probs),
        )


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_bf16_rank_partials(ep_size: int) -> None:
    """Slots in the order given, fused multiply-add, the partial sums rounded to bf16."""
    num_tokens, num_experts, top_k = 10, 8, 4
    experts = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]  # not ascending
    route_rows = torch.empty_like(experts)
    route_rows.view(-1)[experts.flatten().argsort(stable=True)] = torch.arange(experts.numel())
    route_rows[3, 2] = experts[3, 2] = -1
    rows = wide(experts.numel(), 5, dtype=torch.bfloat16)
    probs = torch.rand(num_tokens, top_k)
    out = megatron.unpermute_with_bf16_rank_partials(
        rows, route_rows, experts, probs, num_experts, ep_size
    )
    assert out.dtype == torch.bfloat16
    per_rank = num_experts // ep_size
    for token in range(num_tokens):
        for column in range(5):
            total = np.float32(0)
            for rank in range(ep_size):
                partial = 0.0
                for k in range(top_k):
                    row, expert = int(route_rows[token, k]), int(experts[token, k])
                    if row >= 0 and expert // per_rank == rank:
                        factors = [rows[row, column].item(), probs[token, k].item()]
                        product = Fraction(factors[0]) * Fraction(factors[1])
                        partial = nearest_fp32(product + Fraction(partial))
                total = total + np.float32(rounded(partial, torch.bfloat16))
            assert out[token, column].item() == rounded(float(total), torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variable", [False, True])
def test_unfused_round_trip(dtype: torch.dtype, variable: bool) -> None:
    mask = fixed_mask(50, 9, 4)
    if variable:
        mask = torch.rand(50, 9) < 0.4
    tokens, experts = pairs_of(mask)
    num_rows = tokens.shape[0]
    x = torch.randn(50, 6).to(dtype).requires_grad_()
    probs = torch.rand(50, 9)
    probs[~mask] = math.nan
    probs[tokens[3], experts[3]] = 0.0  # no mark of padding here
    probs.requires_grad_()
    arguments: dict[str, Any] = random.choice([{"num_out_tokens": num_rows}, {}])
    rows, permuted_probs, sorted_indices, none, counts = megatron.permute(
        x, mask, probs=probs, tokens_per_expert=mask.sum(0), **arguments
    )
    assert none is None and counts is not None and counts.tolist() == mask.sum(0).tolist()
    assert permuted_probs is not None
    assert_same_bits(rows.detach(), x.detach()[tokens])
    assert_same_bits(permuted_probs.detach(), probs.detach()[tokens, experts])
    assert_same_bits(sorted_indices, tokens)
    grad_probs = torch.randn(num_rows)
    (d_probs,) = torch.autograd.grad(permuted_probs, probs, grad_probs)
    assert_same_bits(d_probs, torch.zeros(50, 9).index_put((tokens, experts), grad_probs))

    rows = rows.detach().requires_grad_()
    out = megatron.unpermute(
        rows, sorted_indices, torch.Size((50, 6)), probs=probs, routing_map=mask
    )
    total, plain = torch.zeros(50, 6), torch.zeros(50, 6)
    for row, token in enumerate(tokens.tolist()):
        total[token] += rows.detach()[row].float() * probs.detach()[token, experts[row]]
        plain[token] += rows.detach()[row].float()
    assert_same_bits(out.detach(), total.to(dtype))
    d_rows, d_probs = torch.autograd.grad(out.sum(), (rows, probs))
    weights = probs.detach()[tokens, experts]
    assert_same_bits(d_rows, weights[:, None].to(dtype).expand(-1, 6).contiguous())
    sums = rows.detach().double().sum(1)
    want = torch.zeros(50, 9, dtype=torch.float64).index_put((tokens, experts), sums)
    torch.testing.assert_close(d_probs.double(), want, rtol=1e-5, atol=1e-5)
    for more in ({"routing_map": mask}, {}, {"topk": 9}):
        out = megatron.unpermute(rows, sorted_indices, (50, 6), **more)
        assert_same_bits(out.detach(), plain.to(dtype))


@pytest.mark.parametrize("num_out", [4, 10, 13, torch.tensor(7)])
def test_unfused_with_more_and_fewer_rows(num_out: Any) -> None:
    tokens, experts = pairs_of(EXAMPLE)
    used = min(int(num_out), 10)
    x, probs = torch.randn(5, 3, requires_grad=True), torch.rand(5, 3)
    rows, _, sorted_indices, *_ = megatron.permute(x, EXAMPLE, probs, num_out_tokens=num_out)
    assert rows.shape == (int(num_out), 3)
    assert_same_bits(rows[:used].detach(), x.detach()[tokens[:used]])
    assert (rows[used:] == 0).all()
    assert sorted_indices.tolist() == [*tokens[:used].tolist(), *[-1] * (int(num_out) - used)]
    dirty = torch.cat([rows[:used], torch.full((int(num_out) - used, 3), math.nan)])
    out = megatron.unpermute(dirty, sorted_indices, x.shape, probs, EXAMPLE)
    terms = x.detach()[tokens[:used]] * probs[tokens, experts][:used, None]
    torch.testing.assert_close(out.detach(), torch.zeros(5, 3).index_add(0, tokens[:used], terms))
    assert_same_bits(
        megatron.unpermute(dirty, sorted_indices, (5, 3)),
        megatron.unpermute(dirty, sorted_indices, (5, 3), routing_map=EXAMPLE),
    )
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_batch_invariant_arguments() -> None:
    mask = fixed_mask(11, 6, 3)
    x, probs = torch.randn(11, 4), torch.rand(11, 6)
    rows, _, sorted_indices, inverse_map, _ = megatron.permute(
        x, mask, probs, num_out_tokens=33, return_batch_invariant_inverse_map=True
    )
    assert inverse_map is not None
    assert_same_bits(inverse_map, inverse_map_of(mask))
    for ep_size in (1, 3):
        got = megatron.unpermute(
            rows,
            sorted_indices,
            (11, 4),
            probs=probs,
            routing_map=mask,
            batch_invariant_inverse_map=inverse_map,
            ep_size=ep_size,
        )
        want = megatron.unpermute_loop(
            rows, (11, 4), probs=probs, num_experts=6, inverse_map=inverse_map, ep_size=ep_size
        )
        assert_same_bits(got, want)


def _layer(x: Tensor, mask: Tensor, probs: Tensor) -> Tensor:
    rows, _, sorted_indices, inverse_map, _ = megatron.permute(
        x, mask, num_out_tokens=mask.shape[0] * 2, return_batch_invariant_inverse_map=True
    )
    out = megatron.unpermute(rows, sorted_indices, x.shape, probs, mask)
    return out + 2 * megatron.unpermute(
        rows, x.shape, probs=probs, num_experts=4, inverse_map=inverse_map, ep_size=2
    )


def test_compiles_as_one_graph() -> None:
    compiled = torch.compile(_layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 8):
        mask = fixed_mask(num_tokens, 4, 2)
        x = torch.randn(num_tokens, 3, requires_grad=True)
        probs = torch.rand(num_tokens, 4, requires_grad=True)
        results = []
        for function in (compiled, _layer):
            out = function(x, mask, probs)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, probs))))
        for got, want in zip(*results):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shortage", [False, True])
def test_drop_and_pad(shortage: bool) -> None:
    """Every expert has its capacity of rows; where the mask has fewer pairs, the rest are zero."""
    num_tokens, num_experts, capacity = 20, 4, 5
    mask = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    for expert in range(num_experts):
        fewer = {0: 0, 2: 3}.get(expert, 8) if shortage else capacity
        mask[torch.randperm(num_tokens)[:fewer], expert] = True
    x = torch.randn(num_tokens, 3, requires_grad=True)
    probs = torch.rand(num_tokens, num_experts, requires_grad=True)
    rows, permuted_probs, sorted_indices, *_ = megatron.permute(
        x, mask, probs=probs, num_out_tokens=num_experts * capacity, drop_and_pad=True
    )
    assert permuted_probs is not None
    tokens = []
    for expert in range(num_experts):
        own = mask[:, expert].nonzero().flatten().tolist()[:capacity]
        tokens += own + [-1] * (capacity - len(own))
    assert sorted_indices.tolist() == tokens
    valid = torch.tensor(tokens) >= 0
    experts = torch.arange(num_experts).repeat_interleave(capacity)
    assert_same_bits(rows.detach(), x.detach()[tokens].masked_fill(~valid[:, None], 0))
    assert_same_bits(
        permuted_probs.detach(), probs.detach()[tokens, experts].masked_fill(~valid, 0)
    )
    out = megatron.unpermute(
        rows, sorted_indices, x.shape, probs=probs, routing_map=mask, drop_and_pad=True
    )
    kept = torch.zeros_like(mask)
    kept[torch.tensor(tokens)[valid], experts[valid]] = True
    factor = (probs.detach() * kept).sum(1, keepdim=True)
    torch.testing.assert_close(out.detach(), x.detach() * factor)
    d_x, d_probs = torch.autograd.grad(out.sum(), (x, probs))
    torch.testing.assert_close(d_x, factor.expand(-1, 3))
    torch.testing.assert_close(d_probs, x.detach().sum(1, keepdim=True) * kept)


def test_fused_forms_are_those_of_transformer_engine() -> None:
    mask, x = fixed_mask(30, 5, 2), torch.randn(30, 4)
    probs, counts = torch.rand(30, 5), mask.sum(0)
    rows, none, row_id_map, *rest = megatron.permute(x, mask, num_out_tokens=60, fused=True)
    want = transformer_engine.moe_permute(x, mask, 60)
    assert none is None and rest == [None, None]
    assert_same_bits(rows, want[0])
    assert_same_bits(row_id_map, want[1])
    got = megatron.permute(x, mask, probs, num_out_tokens=60, fused=True, tokens_per_expert=counts)
    for result, expected in zip(got, transformer_engine.moe_permute_with_probs(x, probs, mask, 60)):
        assert result is not None
        assert_same_bits(result, expected)
    assert got[3] is None and got[4] is counts
    rows, _, row_id_map, pad_offsets, target = megatron.permute(
        x, mask, probs, fused=True, tokens_per_expert=counts, align_size=16
    )
    assert pad_offsets is not None and target is not None
    assert rows.shape[0] == int(target.sum())
    assert (target % 16 == 0).all()
    out = megatron.unpermute(
        rows, row_id_map, x.shape, probs=probs, fused=True, pad_offsets=pad_offsets
    )
    torch.testing.assert_close(out, x * (probs * mask).sum(1, keepdim=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sort_chunks_by_idxs(dtype: torch.dtype, fused: bool) -> None:
    sizes, order = torch.tensor([4, 0, 7, 3]), torch.tensor([2, 3, 0, 1])
    where = [*range(4, 11), *range(11, 14), *range(4)]
    x = torch.randn(14, 5).to(dtype).requires_grad_()
    probs = torch.rand(14, requires_grad=True)
    out, none = megatron.sort_chunks_by_idxs(x, sizes, order, fused=fused)
    assert none is None
    assert_same_bits(out.detach(), x.detach()[where])
    out, sorted_probs = megatron.sort_chunks_by_idxs(x, sizes, order, probs=probs, fused=fused)
    assert sorted_probs is not None
    assert_same_bits(sorted_probs.detach(), probs.detach()[where])
    grad, grad_probs = torch.randn(14, 5).to(dtype), torch.randn(14)
    d_x, d_probs = torch.autograd.grad((out, sorted_probs), (x, probs), (grad, grad_probs))
    assert_same_bits(d_x[where], grad)
    assert_same_bits(d_probs[where], grad_probs)


def test_bad_arguments_are_named() -> None:
    rows, x, probs = torch.randn(10, 3), torch.randn(5, 3), torch.rand(5, 3)
    tokens, inverse_map = pairs_of(EXAMPLE)[0], inverse_map_of(EXAMPLE)
    calls: list[tuple[str, Any]] = [
        ("tokens", lambda: megatron.permute(x[:4], EXAMPLE, num_out_tokens=10)),
        ("routing_map", lambda: megatron.unpermute(rows, tokens, (5, 3), probs)),
        ("restore_shape", lambda: megatron.unpermute(rows, tokens, (6, 3), routing_map=EXAMPLE)),
        (
            "return_batch_invariant_inverse_map",
            lambda: megatron.permute(
                x, EXAMPLE, num_out_tokens=10, fused=True, return_batch_invariant_inverse_map=True
            ),
        ),
        (
            "reduction.ep_size",
            lambda: megatron.unpermute(
                rows, (5, 3), probs=None, num_experts=3, inverse_map=inverse_map, ep_size=2
            ),
        ),
        (
            "batch_invariant_inverse_map",
            lambda: megatron.unpermute(
                rows, tokens, (5, 3), batch_invariant_inverse_map=inverse_map
            ),
        ),
    ]
    for argument, call in calls:
        with pytest.raises(ArgumentError, match=f"`{argument}`"):
            call()
