"""The drop-in for d9d's permutation, against loops over the documented rules."""

import math
from typing import Any

import pytest
import torch
from cases import assert_same_bits
from torch import Tensor
from torch.autograd import gradcheck

from tokenyard import ArgumentError
from tokenyard.compat import d9d

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
T, E, H, S, R = 40, 6, 8, 3, 90


def random_mask() -> Tensor:
    """Exactly R ones anywhere: a token has 0 to E experts."""
    mask = torch.zeros(T * E, dtype=torch.int32)
    mask[torch.randperm(T * E)[:R]] = 1
    return mask.view(T, E)


def pairs_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, experts) of the rows in order."""
    experts, tokens = mask.t().nonzero(as_tuple=True)
    return tokens, experts


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("default", [False, True])
def test_round_trip(dtype: torch.dtype, default: bool) -> None:
    """The default number of rows drops nothing."""
    mask = random_mask()
    tokens, experts = pairs_of(mask)
    x = torch.randn(T, H).to(dtype).requires_grad_()
    probs = torch.rand(T, E) + 0.1
    probs[mask == 0] = math.nan
    probs.requires_grad_()
    arguments: dict[str, Any] = {} if default else {"num_out_tokens": R}
    rows, permuted_probs, row_id_map = d9d.moe_permute_with_probs(x, probs, mask, **arguments)
    assert_same_bits(rows.detach(), x.detach()[tokens])
    assert_same_bits(permuted_probs.detach(), probs.detach()[tokens, experts])
    grad, grad_probs = torch.randn(R, H).to(dtype), torch.randn(R)
    d_x, d_probs = torch.autograd.grad((rows, permuted_probs), (x, probs), (grad, grad_probs))
    want = torch.zeros(T, H, dtype=torch.float64).index_add(0, tokens, grad.double())
    torch.testing.assert_close(d_x.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)
    assert_same_bits(d_probs, torch.zeros(T, E).index_put((tokens, experts), grad_probs))

    rows = rows.detach().requires_grad_()
    out = d9d.moe_unpermute_mask(rows, row_id_map, probs, torch.Size((T, H)))
    total = torch.zeros(T, H)
    for row in reversed(range(R)):  # descending rows are descending experts
        product = rows.detach()[row].float() * probs.detach()[tokens[row], experts[row]]
        total[tokens[row]] += product
    assert_same_bits(out.detach(), total.to(dtype))
    plain = torch.zeros(T, H)
    for row in reversed(range(R)):
        plain[tokens[row]] += rows.detach()[row].float()
    assert_same_bits(d9d.moe_unpermute_mask(rows, row_id_map).detach(), plain.to(dtype))
    grad = torch.randn(T, H).to(dtype)
    d_rows, d_probs = torch.autograd.grad(out, (rows, probs), grad)
    factor = probs.detach()[tokens, experts][:, None]
    assert_same_bits(d_rows, (grad[tokens].float() * factor).to(dtype))
    products = (grad[tokens].double() * rows.detach().double()).sum(1)
    want = torch.zeros(T, E, dtype=torch.float64).index_put((tokens, experts), products)
    torch.testing.assert_close(d_probs.double(), want, rtol=1e-5, atol=1e-5)
    assert (d_probs[mask == 0] == 0).all()


def test_default_number_of_rows_with_nothing_routed() -> None:
    x, probs = torch.randn(4, 3, requires_grad=True), torch.rand(4, 2)
    mask = torch.zeros(4, 2, dtype=torch.bool)
    rows, permuted_probs, row_id_map = d9d.moe_permute_with_probs(x, probs, mask)
    assert rows.shape == (0, 3) and permuted_probs.shape == (0,)
    out = d9d.moe_unpermute_mask(rows, row_id_map, restore_shape=(4, 3))
    assert out.tolist() == [[0] * 3] * 4
    assert (torch.autograd.grad(out.sum(), x)[0] == 0).all()


def test_row_id_map() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    row_id_map = d9d.make_row_id_map(mask, 5, 3)
    entries = [[3, 0, 1, 0], [5, 1, 2, 0], [6, 2], [4, 2, 1, 0], []]
    assert (row_id_map.dtype, row_id_map.shape) == (torch.int32, (5, 7))
    for cells, want in zip(row_id_map.tolist(), entries):
        n = len(want) // 2
        assert cells[6] == n
        assert cells[:n] + cells[3 : 3 + n] == want
    assert_same_bits(d9d.make_row_id_map(mask.t().contiguous().t().bool(), 5, 3), row_id_map)
    with pytest.raises(ArgumentError, match="`routing_map`"):
        d9d.make_row_id_map(mask, 5, 4)


@pytest.mark.parametrize("num_out", [50, R, R + 7])
def test_permute_with_mask_map(num_out: int) -> None:
    mask = random_mask()
    tokens, experts = pairs_of(mask)
    x, scale = torch.randn(T, H), torch.rand(T, S)
    probs = torch.rand(T, E) + 0.1
    zero = (int(tokens[5]), int(experts[5]))
    probs[zero] = 0
    row_id_map = d9d.make_row_id_map(mask, T, E)

    def longer(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(7, *values.shape[1:])])[:num_out]

    rows, permuted_scale, permuted_probs = d9d.permute_with_mask_map(
        x, row_id_map, probs, scale, T, E, num_out, H, S
    )
    want = longer(x[tokens])
    want[5] = 0
    assert permuted_scale is not None and permuted_probs is not None
    assert_same_bits(rows, want)
    assert_same_bits(permuted_scale, longer(scale[tokens]))
    assert_same_bits(permuted_probs, longer(probs[tokens, experts]))
    rows, *none = d9d.permute_with_mask_map(x, row_id_map, None, None, T, E, num_out, H, None)
    assert_same_bits(rows, longer(x[tokens]))
    assert none == [None, None]


@pytest.mark.parametrize("num_rows", [50, R, R + 7])
def test_unpermute_with_mask_map(num_rows: int) -> None:
    mask = random_mask()
    tokens, experts = (ids[:num_rows] for ids in pairs_of(mask))
    row_id_map = d9d.make_row_id_map(mask, T, E)
    rows, probs = torch.randn(num_rows, H), torch.rand(T, E)
    permuted_probs = torch.rand(num_rows)
    used = tokens.shape[0]
    rows[used:] = permuted_probs[used:] = math.nan
    out, unpermuted = d9d.unpermute_with_mask_map(rows, row_id_map, probs, permuted_probs, T, E, H)
    terms = rows[:used] * probs[tokens, experts][:, None]
    torch.testing.assert_close(out, torch.zeros(T, H).index_add(0, tokens, terms))
    assert unpermuted is not None
    want = torch.zeros(T, E).index_put((tokens, experts), permuted_probs[:used])
    assert_same_bits(unpermuted, want)
    out, none = d9d.unpermute_with_mask_map(rows, row_id_map, None, None, T, E, H)
    torch.testing.assert_close(out, torch.zeros(T, H).index_add(0, tokens, rows[:used]))
    assert none is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows", [50, R + 7])
def test_backward_with_merging_probs(num_rows: int, dtype: torch.dtype) -> None:
    mask = random_mask()
    tokens, experts = (ids[:num_rows] for ids in pairs_of(mask))
    row_id_map = d9d.make_row_id_map(mask, T, E)
    grad, rows = torch.randn(T, H).to(dtype), torch.randn(num_rows, H).to(dtype)
    probs = torch.rand(T, E)
    probs[mask == 0] = math.nan
    with torch.no_grad():
        d_rows, d_probs = d9d.unpermute_with_mask_map_bwd_with_merging_probs(
            grad, row_id_map, rows, probs, T, E, num_rows, H
        )
    used = tokens.shape[0]
    want = (grad[tokens].float() * probs[tokens, experts][:, None]).to(dtype)
    assert_same_bits(d_rows[:used], want)
    assert (d_rows[used:] == 0).all()
    products = (grad[tokens].double() * rows[:used].double()).sum(1)
    want = torch.zeros(T, E, dtype=torch.float64).index_put((tokens, experts), products)
    torch.testing.assert_close(d_probs.double(), want, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_lower_level_by_finite_differences() -> None:
    """Also with dropped pairs, and with rows left over."""

    def random(*shape: int) -> Tensor:
        return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()

    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    row_id_map = d9d.make_row_id_map(mask, 5, 3)
    for num_out in (5, 9):
        assert gradcheck(
            lambda x, p, s, n=num_out: d9d.permute_with_mask_map(
                x, row_id_map, p, s, 5, 3, n, 2, 1
            ),
            (random(5, 2), random(5, 3), random(5, 1)),
        )
        assert gradcheck(
            lambda r, m, p: d9d.unpermute_with_mask_map(r, row_id_map, m, p, 5, 3, 2),
            (random(num_out, 2), random(5, 3), random(num_out)),
        )


def test_sizes_must_agree_with_the_tensors() -> None:
    mask = random_mask()
    row_id_map = d9d.make_row_id_map(mask, T, E)
    x, probs = torch.randn(T, H), torch.rand(T, E)
    calls: list[Any] = [
        lambda: d9d.permute_with_mask_map(x, row_id_map, probs, None, T, E, R, H + 1, None),
        lambda: d9d.permute_with_mask_map(x, row_id_map, probs, None, T, E + 1, R, H, None),
        lambda: d9d.unpermute_with_mask_map(x, row_id_map, None, None, T + 1, E, H),
        lambda: d9d.unpermute_with_mask_map_bwd_with_merging_probs(
            x, row_id_map, torch.zeros(R, H), probs, T, E, R + 1, H
        ),
    ]
    for call in calls:
        with pytest.raises(ArgumentError):
            call()
