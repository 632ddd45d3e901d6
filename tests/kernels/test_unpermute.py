"""The kernels of unpermute in the interpreter: every order bit for bit against the definition.

No bf16 rows: the interpreter stores fp32 as bf16 by truncation.
"""

import os
import random
from typing import Any

import pytest
import torch
from cases import (
    SHAPES,
    SPECIAL,
    Case,
    assert_same_bits,
    integers,
    random_case,
    routings,
    wide,
)
from hypothesis import given, settings
from launches import launched
from torch import Tensor

import tokenyard
from tokenyard import RankTree, Routing
from tokenyard.ops.unpermute import Reduction

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
DTYPES = [FP16, FP32, FP64]
ORDERS: list[Reduction] = ["slot", "expert", "expert_descending"]


def trees(num_experts: int) -> list[Reduction]:
    return [
        RankTree(ep_size, within, across)
        for ep_size in (1, 2, 3, num_experts)
        if num_experts % ep_size == 0
        for within in ("fp32", "fp64")
        for across in ("fp32", "fp64")
    ]


def rows_for(routing: Routing, width: int, dtype: torch.dtype = FP32) -> Tensor:
    """Rows of very different sizes; NaN in the padding, which must not be read."""
    rows_RH = wide(routing.num_rows, width, dtype=dtype)
    rows_RH[routing.slot_of_row < 0] = torch.nan
    return rows_RH


def weights_for(routing: Routing, dtype: torch.dtype = FP32) -> Tensor:
    """NaN where a slot has no row."""
    weights_TK = wide(routing.num_tokens, routing.top_k, dtype=dtype)
    weights_TK[routing.row_of_slot < 0] = torch.nan
    return weights_TK


def check(
    rows_RH: Tensor, routing: Routing, weights_TK: Tensor | None, reduction: Reduction = "slot"
) -> Tensor:
    got, names = launched(
        lambda: tokenyard.unpermute(rows_RH, routing, weights_TK, reduction=reduction)
    )
    assert names == ["_combine_kernel"] * (got.numel() > 0 and rows_RH.numel() > 0)
    want = tokenyard.unpermute_reference(rows_RH, routing, weights_TK, reduction=reduction)
    assert_same_bits(got, want)
    return got


def gradients(
    rows_RH: Tensor, routing: Routing, weights_TK: Tensor | None, grad_TH: Tensor
) -> list[Tensor]:
    inputs = [rows_RH.detach().requires_grad_()]
    if weights_TK is not None:
        inputs.append(weights_TK.detach().requires_grad_())
    out_TH = tokenyard.unpermute(inputs[0], routing, *inputs[1:])
    return list(torch.autograd.grad(out_TH, inputs, grad_TH))


def check_gradients(
    rows_RH: Tensor, routing: Routing, weights_TK: Tensor | None, grad_TH: Tensor
) -> list[Tensor]:
    """d_rows has the bits of the definition; d_weights sums in an order of its own."""
    got, names = launched(lambda: gradients(rows_RH, routing, weights_TK, grad_TH))
    want = gradients(rows_RH, routing, weights_TK, grad_TH)
    if rows_RH.numel() and (grad_TH.numel() or weights_TK is None):
        assert ("_permute_kernel" if weights_TK is None else "_backward_kernel") in names
    assert_same_bits(got[0], want[0])
    assert not got[0][routing.slot_of_row < 0].any()
    if weights_TK is not None:
        exact_TK = gradients(rows_RH.double(), routing, weights_TK.double(), grad_TH.double())[1]
        size_TK = gradients(
            rows_RH.double().abs(), routing, weights_TK.double(), grad_TH.double().abs()
        )[1]
        eps = torch.finfo(FP64 if rows_RH.dtype == FP64 else FP32).eps
        bound_TK = size_TK * (64 * eps + torch.finfo(weights_TK.dtype).eps) + 1e-7
        assert got[1].dtype == weights_TK.dtype
        assert ((got[1].double() - exact_TK).abs() <= bound_TK).all()
        assert not got[1][routing.row_of_slot < 0].any()
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_routings(name: str, dtype: torch.dtype, poisoned_memory: None) -> None:
    routing = SPECIAL[name].route()
    rows_RH = rows_for(routing, 20, dtype)
    grad_TH = wide(routing.num_tokens, 20, dtype=dtype).clamp(-9, 9)
    for weights_TK in (None, weights_for(routing)):
        for reduction in [*ORDERS, RankTree(routing.num_experts, "fp64", "fp64")]:
            check(rows_RH, routing, weights_TK, reduction)
        check_gradients(rows_RH, routing, weights_TK, grad_TH)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_models(shape: tuple[int, ...], poisoned_memory: None) -> None:
    num_tokens, width, num_experts, top_k = shape
    routing = random_case(num_tokens, num_experts, top_k, row_alignment=4).route()
    rows_RH, weights_TK = rows_for(routing, width), weights_for(routing)
    for reduction in [*ORDERS, *random.sample(trees(num_experts), 2)]:
        check(rows_RH, routing, weights_TK, reduction)
    check_gradients(rows_RH, routing, weights_TK, torch.randn(num_tokens, width))


@settings(max_examples=12)
@given(routings())
def test_drawn_routings(case: Case) -> None:
    routing = case.route()
    dtype = random.choice(DTYPES)
    rows_RH = rows_for(routing, 3, dtype)
    for weights_TK in (None, weights_for(routing, random.choice(DTYPES))):
        for reduction in [*ORDERS, random.choice(trees(case.num_experts))]:
            check(rows_RH, routing, weights_TK, reduction)
    weights_TK = weights_for(routing).clamp(-9, 9)
    check_gradients(rows_RH, routing, weights_TK, torch.randn(case.num_tokens, 3).to(dtype))


@pytest.mark.parametrize("reduction", [*ORDERS, *trees(6)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_order(dtype: torch.dtype, reduction: Reduction) -> None:
    """K = 6 of 6 experts, some dropped, in an order that no other order equals."""
    routing = random_case(9, 6, 6, row_alignment=2).route()
    rows_RH = rows_for(routing, 40, dtype)
    for weights_dtype in DTYPES:
        check(rows_RH, routing, weights_for(routing, weights_dtype), reduction)
    check(rows_RH, routing, None, reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("within", ["fp32", "fp64"])
def test_a_partial_sum_keeps_its_precision(dtype: torch.dtype, within: Any) -> None:
    routing = random_case(9, 6, 6, row_alignment=2).route()
    reduction = RankTree(1, within, "none")
    out_TH = check(rows_for(routing, 40, dtype), routing, weights_for(routing), reduction)
    assert out_TH.dtype == (FP64 if dtype == FP64 else FP32)


def test_orders_differ() -> None:
    """Or the test above would not tell them apart."""
    routing = random_case(9, 12, 12).route()
    rows_RH, weights_TK = rows_for(routing, 40), weights_for(routing)
    sums = [
        check(rows_RH, routing, weights_TK, reduction)
        for reduction in [*ORDERS, RankTree(3), RankTree(3, "fp64"), RankTree(3, "fp32", "fp64")]
    ]
    for i, one in enumerate(sums):
        assert all(not torch.equal(one, other) for other in sums[:i])


@pytest.mark.parametrize("reduction", [*ORDERS, RankTree(2), RankTree(4, "fp64", "fp64")], ids=str)
def test_duplicates_keep_slot_order(reduction: Reduction) -> None:
    ids_TK = torch.randint(-1, 4, (20, 7))
    routing = tokenyard.route(ids_TK, 4, num_rows=120)
    check(rows_for(routing, 20), routing, weights_for(routing), reduction)


def test_large_terms_cancel_within_a_rank() -> None:
    routing = tokenyard.route(torch.tensor([[0, 1, 2, 3]]), 4)
    rows_RH = torch.tensor([[1e20], [1.0], [-1e20], [1.0]])
    assert check(rows_RH, routing, None, RankTree(2)).item() == 0
    assert check(rows_RH, routing, None, RankTree(1)).item() == 1


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("across", ["fp32", "fp64"])
def test_fused_bf16_partials(ep_size: int, across: str) -> None:
    """Small integers are exact in bf16; other values within the roundings of the partial sums."""
    routing = tokenyard.route(torch.randint(-1, 4, (9, 5)), 4, row_alignment=2)
    reduction = RankTree(ep_size, "fma_bf16", across)  # type: ignore[arg-type]
    whole_RH = integers(routing.num_rows, 20, dtype=FP16)
    whole_TK = integers(routing.num_tokens, 5, dtype=FP32)
    check(whole_RH, routing, whole_TK, reduction)

    rows_RH, weights_TK = torch.randn(routing.num_rows, 20), torch.rand(9, 5)
    got, names = launched(
        lambda: tokenyard.unpermute(rows_RH, routing, weights_TK, reduction=reduction)
    )
    assert names == ["_combine_kernel"]
    want = tokenyard.unpermute_reference(rows_RH, routing, weights_TK, reduction=reduction)
    size_TH = tokenyard.unpermute_reference(rows_RH.abs(), routing, weights_TK)
    assert ((got - want).abs() <= size_TH * 2.0**-6).all()


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(40, 22), (32, 32), (33, 33), (48, 40), (66, 65)]
)
def test_many_choices(num_experts: int, top_k: int, poisoned_memory: None) -> None:
    """Past 32 choices, slots are brought into order on the host, and the loop ends early."""
    routing = random_case(4, num_experts, top_k, row_alignment=2).route()
    rows_RH, weights_TK = rows_for(routing, 20), weights_for(routing)
    ep_size = 2 if num_experts % 2 == 0 else 3
    for reduction in [*ORDERS, RankTree(ep_size), RankTree(ep_size, "fp64", "fp64")]:
        check(rows_RH, routing, weights_TK, reduction)
        check(rows_RH, routing, None, reduction)
    whole_RH = integers(routing.num_rows, 8, dtype=FP32, bound=1)
    whole_TK = integers(4, top_k, dtype=FP32, bound=1)
    check(whole_RH, routing, whole_TK, RankTree(ep_size, "fma_bf16"))
    check_gradients(rows_RH, routing, weights_TK, torch.randn(4, 20))

    first_and_last_TK = torch.full((4, top_k), -1)
    first_and_last_TK[1, top_k - 1], first_and_last_TK[2, 0] = 1, 1
    for ids_TK in (first_and_last_TK, torch.full((4, top_k), -1)):
        routing = tokenyard.route(ids_TK, num_experts)
        check(rows_for(routing, 20), routing, weights_for(routing))


@pytest.mark.parametrize("width", [1, 2, 8, 20, 255, 256, 257, 1023, 1025, 2047, 2049, 2880, 4100])
def test_widths(width: int, poisoned_memory: None) -> None:
    routing = random_case(3, 4, 2, row_alignment=2).route()
    for dtype in (FP16, FP64):
        rows_RH, weights_TK = rows_for(routing, width, dtype), weights_for(routing)
        check(rows_RH, routing, weights_TK)
        check(rows_RH, routing, weights_TK, RankTree(2))
        grad_TH = wide(3, width, dtype=dtype).clamp(-9, 9)
        check_gradients(rows_RH, routing, weights_TK.clamp(-9, 9), grad_TH)


def test_a_very_wide_row() -> None:
    routing = random_case(2, 3, 2).route()
    rows_RH, weights_TK = rows_for(routing, 16500, FP16), weights_for(routing)
    check(rows_RH, routing, weights_TK)
    check_gradients(rows_RH, routing, weights_TK.clamp(-9, 9), torch.randn(2, 16500).half())


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 127, 128, 129])
def test_tokens_at_a_block_boundary(num_tokens: int, poisoned_memory: None) -> None:
    """32 tokens a program at width 64 and 128 at width 8; slots of the backward likewise."""
    routing = random_case(num_tokens, 5, 2, row_alignment=4).route()
    for width in (8, 64):
        rows_RH, weights_TK = rows_for(routing, width, FP16), weights_for(routing)
        for reduction in ("slot", "expert", RankTree(5)):
            check(rows_RH, routing, weights_TK, reduction)
        grad_TH = torch.randn(num_tokens, width).half()
        check_gradients(rows_RH, routing, weights_TK.clamp(-9, 9), grad_TH)


def test_strides(poisoned_memory: None) -> None:
    routing = random_case(12, 4, 2, row_alignment=2).route()
    num_rows = routing.num_rows
    both_RH = torch.randn(num_rows, 80)
    weights_TK = torch.rand(12, 2)
    for rows_RH in (
        both_RH[:, 40:60],
        both_RH[:, 3:23],
        both_RH[:, :40:2],
        torch.randn(20, num_rows).T,
        torch.randn(1, 20).expand(num_rows, 20),
        torch.randn(num_rows, 1).expand(num_rows, 20),
        torch.randn(num_rows * 20 + 1)[1:].view(num_rows, 20),
    ):
        grad_TH = torch.randn(12, 20)
        for weights in (weights_TK, torch.rand(2, 12).T, torch.rand(12, 5)[:, 1:3], None):
            check(rows_RH, routing, weights)
            check(rows_RH, routing, weights, RankTree(2))
        check_gradients(rows_RH, routing, weights_TK, grad_TH)
    one_RH = torch.randn(num_rows, 5)[:, 2:3]
    check(one_RH, routing, weights_TK)
    check_gradients(one_RH, routing, weights_TK, torch.randn(1, 1).expand(12, 1))


def test_strides_of_gradients(poisoned_memory: None) -> None:
    routing = random_case(12, 4, 2, row_alignment=2).route()
    rows_RH, weights_TK = rows_for(routing, 20), weights_for(routing)
    for grad_TH in (
        torch.ones(1, 1).expand(12, 20),  # as `.sum().backward()` makes it
        torch.randn(1, 20).expand(12, 20),
        torch.randn(12, 1).expand(12, 20),
        torch.randn(20, 12).T,
        torch.randn(12, 50)[:, 7:27],
        torch.randn(12 * 20 + 1)[1:].view(12, 20),
    ):
        check_gradients(rows_RH, routing, weights_TK, grad_TH)
        check_gradients(rows_RH, routing, None, grad_TH)


@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_mixed_dtypes(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    routing = random_case(7, 4, 3, row_alignment=4).route()
    weights_TK = weights_for(routing, weights_dtype).clamp(-2, 2)
    grad_TH = torch.randn(7, 20).to(dtype)
    check_gradients(rows_for(routing, 20, dtype).clamp(-9, 9), routing, weights_TK, grad_TH)


@pytest.mark.parametrize("weighted", [True, False])
def test_infinite_gradients_stay_in_their_token(weighted: bool) -> None:
    routing = random_case(8, 4, 2, row_alignment=2).route()
    weights_TK = weights_for(routing) if weighted else None
    rows_RH, grad_TH = rows_for(routing, 20), torch.randn(8, 20)
    clean = launched(lambda: gradients(rows_RH, routing, weights_TK, grad_TH))[0]
    grad_TH[3], grad_TH[5] = torch.nan, torch.inf
    dirty = launched(lambda: gradients(rows_RH, routing, weights_TK, grad_TH))[0]
    elsewhere = ~torch.isin(routing.token_of_row, torch.tensor([3, 5]))
    assert torch.equal(dirty[0][elsewhere], clean[0][elsewhere])
    if weighted:
        others = torch.tensor([0, 1, 2, 4, 6, 7])
        assert torch.equal(dirty[1][others], clean[1][others])


def test_infinite_rows_stay_in_their_token() -> None:
    routing = tokenyard.route(torch.tensor([[0, 1], [1, -1], [2, 0]]), 3)
    rows_RH = torch.ones(routing.num_rows, 8)
    rows_RH[routing.row_of_slot[0, 0]] = torch.inf
    for reduction in [*ORDERS, RankTree(3), RankTree(1, "fp64", "fp64")]:
        out_TH = check(rows_RH, routing, torch.ones(3, 2), reduction)
        assert out_TH[:, 0].tolist() == [torch.inf, 1, 2]


def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    """Its sum, its rows' gradients and its weights' gradients, in any batch and at any place in it."""
    choices = random_case(40, 5, 3).topk_indices
    ids_TK = torch.tensor(choices)
    x_TKH, weights_TK = wide(40, 3, 300, dtype=FP32), wide(40, 3, dtype=FP32)
    grad_TH = wide(40, 300, dtype=FP32)

    def results(tokens: list[int]) -> list[Tensor]:
        routing = tokenyard.route(ids_TK[tokens], 5, row_alignment=4)
        rows_RH = torch.zeros(routing.num_rows, 300)
        row_TK = routing.row_of_slot.long()
        rows_RH[row_TK[row_TK >= 0]] = x_TKH[tokens][row_TK >= 0]
        weights = weights_TK[tokens]
        d_rows_RH, d_weights_TK = gradients(rows_RH, routing, weights, grad_TH[tokens])
        d_rows_TKH = d_rows_RH[row_TK.clamp(min=0)].masked_fill(row_TK[..., None] < 0, 0)
        sums = [
            tokenyard.unpermute(rows_RH, routing, weights, reduction=reduction)
            for reduction in ("slot", RankTree(5))
        ]
        return [*sums, d_rows_TKH, d_weights_TK]

    together, _ = launched(lambda: results(list(range(40))))
    for tokens in ([7], [39, 7, 0], random.sample(range(40), 40)):
        alone, _ = launched(lambda tokens=tokens: results(tokens))
        for one, all_of_them in zip(alone, together):
            assert torch.equal(one, all_of_them[tokens])


def test_no_columns() -> None:
    routing = random_case(3, 4, 2).route()
    rows_RH, weights_TK = torch.zeros(routing.num_rows, 0), torch.rand(3, 2)
    assert check(rows_RH, routing, weights_TK).shape == (3, 0)
    got, _ = launched(lambda: gradients(rows_RH, routing, weights_TK, torch.zeros(3, 0)))
    assert_same_bits(got[1], torch.zeros(3, 2))
