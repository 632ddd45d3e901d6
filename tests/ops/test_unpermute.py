"""unpermute, bit for bit, against scalar loops in every order; gradients, hazards, compilation, errors."""

import random
from dataclasses import replace
from fractions import Fraction
from math import ldexp
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    CALLS,
    FLOATS,
    SHAPES,
    SPECIAL,
    Case,
    accumulator,
    assert_same_bits,
    integers,
    nearest_fp32,
    random_case,
    rounded,
    routings,
    wide,
)
from hypothesis import given, settings
from torch import Tensor

import tokenyard
from tokenyard import ArgumentError, RankTree
from tokenyard.ops.unpermute import Reduction, _fma_fp32

FMA = RankTree(1, "fma_bf16")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def trees(num_experts: int) -> list[RankTree]:
    return [
        RankTree(ep_size, within, across)
        for ep_size in (1, 2, 3, num_experts)
        if num_experts % ep_size == 0
        for within in ("fp32", "fp64", "fma_bf16")
        for across in ("fp32", "fp64")
    ]


def literal_element(
    slots: list[tuple[int, float, float | None]], reduction: Reduction, num_experts: int, acc: type
) -> float:
    """One element of the result before its last rounding; slots holds (expert, row, weight) by k."""
    terms = [
        (expert, acc(row) if weight is None else acc(row) * acc(weight))
        for expert, row, weight in slots
    ]
    total = acc(0)
    if not isinstance(reduction, RankTree):
        if reduction != "slot":
            terms.sort(key=lambda term: term[0] if reduction == "expert" else -term[0])
        for _, term in terms:
            total = total + term
        return total
    if reduction.across_ranks == "fp64":
        total = np.float64(0)
    experts_per_rank = num_experts // reduction.ep_size
    for rank in range(reduction.ep_size):
        if reduction.within_rank == "fma_bf16":
            partial = 0.0
            for expert, row, weight in slots:
                if expert // experts_per_rank == rank:
                    factor = Fraction(float(np.float32(weight)))
                    partial = nearest_fp32(Fraction(row) * factor + Fraction(partial))
            partial = rounded(partial, BF16)
        else:
            partial = np.float64(0) if reduction.within_rank == "fp64" else acc(0)
            for expert, term in sorted(terms, key=lambda term: term[0]):
                if expert // experts_per_rank == rank:
                    partial = partial + term
        total = total + acc(partial)
    return acc(total)


def literal(
    rows_RH: Tensor, case: Case, topk_weights_TK: Tensor | None, reduction: Reduction
) -> Tensor:
    out_TH = torch.zeros(case.num_tokens, rows_RH.shape[1], dtype=FP64)
    for token, slots in enumerate(case.rows_of_token()):
        for h in range(rows_RH.shape[1]):
            values = [
                (e, rows_RH[r, h].item(), w if w is None else w[token, k].item())
                for k, r, e in slots
                for w in [topk_weights_TK]
            ]
            acc = accumulator(rows_RH.dtype)
            element = literal_element(values, reduction, case.num_experts, acc)
            out_TH[token, h] = rounded(element, rows_RH.dtype)
    return out_TH.to(rows_RH.dtype)


@settings(max_examples=25)
@given(routings())
def test_every_order_equals_the_scalar_loops(case: Case) -> None:
    for dtype in FLOATS:
        rows_RH = wide(len(case.slot_of_row()), 2, dtype=dtype)
        for weight_dtype in (None, FP32, dtype, FP64):
            weights_TK = None
            if weight_dtype is not None:
                weights_TK = wide(case.num_tokens, case.top_k, dtype=weight_dtype)
            reductions = ["slot", "expert", "expert_descending"]
            for reduction in [*reductions, *random.sample(trees(case.num_experts), 3)]:
                fused = isinstance(reduction, RankTree) and reduction.within_rank == "fma_bf16"
                if fused and (weights_TK is None or dtype == FP64):
                    continue
                want_TH = literal(rows_RH, case, weights_TK, reduction)
                for unpermute in (tokenyard.unpermute, tokenyard.unpermute_reference):
                    out_TH = unpermute(rows_RH, case.route(), weights_TK, reduction=reduction)
                    assert_same_bits(out_TH, want_TH)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_every_rank_tree_on_eight_experts(dtype: torch.dtype) -> None:
    case = random_case(4, 12, 8)
    rows_RH = wide(case.num_tokens * 8, 2, dtype=dtype)
    weights_TK = torch.rand(4, 8)
    for reduction in trees(12):
        out_TH = tokenyard.unpermute(rows_RH, case.route(), weights_TK, reduction=reduction)
        assert_same_bits(out_TH, literal(rows_RH, case, weights_TK, reduction))


def test_orders_differ() -> None:
    """The inputs above tell the orders apart: all five results differ somewhere."""
    case = random_case(64, 12, 8)
    rows_RH, weights_TK = wide(64 * 8, 8, dtype=FP32), torch.rand(64, 8)
    reductions = ["slot", "expert", "expert_descending", RankTree(3), RankTree(3, "fp64", "fp64")]
    results = [
        tokenyard.unpermute(rows_RH, case.route(), weights_TK, reduction=r) for r in reductions
    ]
    for i, first in enumerate(results):
        assert all(not torch.equal(first, second) for second in results[:i])


def test_check_value_of_the_rank_tree() -> None:
    case = Case(((0, 1, 2, 3),), 4, 4)
    rows_RH = torch.tensor([[1e20], [1.0], [-1e20], [1.0]])
    for weights_TK in (None, torch.ones(1, 4)):
        for ep_size, want in ((1, 1.0), (2, 0.0)):
            for across in ("fp32", "fp64"):
                tree = RankTree(ep_size, across_ranks=across)
                out_TH = tokenyard.unpermute(rows_RH, case.route(), weights_TK, reduction=tree)
                assert out_TH.item() == want


def test_expert_orders_follow_ids_whatever_the_slot() -> None:
    for choices in ((3, 1, 0, 2), (2, 3, 1, 0)):
        case = Case((choices,), 4, 4)
        rows_RH = torch.tensor([[1e20], [1.0], [-1e20], [3.0]])  # row e belongs to expert e
        for reduction, want in (("expert", 3.0), ("expert_descending", 0.0)):
            out_TH = tokenyard.unpermute(rows_RH, case.route(), reduction=reduction)
            assert out_TH.item() == want


def test_accumulates_in_fp32_and_rounds_once() -> None:
    case = Case(((0, 1, 2),), 3, 3)
    for dtype, large in ((BF16, 256.0), (torch.float16, 2048.0)):
        rows_RH = torch.tensor([[large], [1.0], [1.0]], dtype=dtype)
        for weights_TK in (None, torch.ones(1, 3), torch.ones(1, 3, dtype=dtype)):
            out_TH = tokenyard.unpermute(rows_RH, case.route(), weights_TK)
            assert out_TH.item() == large + 2
    # an fp32 weight is not rounded to the rows' dtype first
    rows_RH = torch.tensor([[256.0], [0.0], [0.0]], dtype=BF16)
    weights_TK = torch.tensor([[1 + 3 / 512, 0, 0]])
    assert tokenyard.unpermute(rows_RH, case.route(), weights_TK).item() == 258.0


def fma_operands() -> list[tuple[float, float, float]]:
    rng = random.Random(0)

    def value(low: int, high: int) -> float:
        return nearest_fp32(Fraction(rng.uniform(-2, 2)) * Fraction(2) ** rng.randint(low, high))

    found = [(value(-8, 8), value(-8, 8), value(-16, 16)) for _ in range(1500)]
    found += [(value(-70, -60), value(-84, -60), value(-149, -120)) for _ in range(1000)]
    found += [(value(55, 66), value(55, 66), value(110, 127)) for _ in range(300)]
    for _ in range(1500):
        a, b = value(-8, 8), value(-8, 8)
        found.append((a, b, -nearest_fp32(Fraction(a) * Fraction(b))))  # what cancels
        # near the middle of two fp32 neighbours: where a second rounding goes wrong
        c = 1 + rng.randrange(2**23) * 2.0**-23
        sign = rng.choice([-1.0, 1.0])
        tiny = ldexp(1 + rng.randrange(2**10) * 2.0**-10, rng.randint(-100, -54))
        half = ldexp(1.0, -24) + rng.choice([0.0, ldexp(1.0, -40)])
        found += [(sign * half, 1.0, c), (sign * tiny, 1 + 2.0**-23, c), (2.0**-12, 2.0**-12, c)]
        factor = 1 + rng.randrange(2**12) * 2.0**-23
        found.append((sign * 2.0**-12 * factor, 2.0**-12 * (2 - factor), c))
    found += [(2.0**-75, 2.0**-75, 0.0), (2.0**-75, 2.0**-75, 2.0**-149), (2.0**64, 2.0**63, 0.0)]
    return found


def test_fma_rounds_the_exact_result_once() -> None:
    operands = fma_operands()
    a_N, b_N, c_N = (torch.tensor(column, dtype=FP32) for column in zip(*operands))
    want = [nearest_fp32(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in operands]
    got_N, want_N = _fma_fp32(a_N, b_N, c_N), torch.tensor(want, dtype=FP32)
    wrong = (got_N != want_N).nonzero().flatten().tolist()
    assert not wrong, [operands[i] for i in wrong[:3]]
    twice_N = (a_N.double() * b_N.double() + c_N.double()).float()
    assert (twice_N != want_N).any()  # the operands do contain double-rounding traps


def test_fma_of_infinities_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    operands = [(inf, 1, 1), (-inf, 2, 5), (1, 1, inf), (inf, 1, -inf), (inf, 0, 1), (nan, 1, 1)]
    operands += [(1, 1, nan), (3e38, 3e38, 0), (-3e38, 3e38, 1), (3e38, 3e38, -inf)]
    want = [inf, -inf, inf, nan, nan, nan, nan, inf, -inf, -inf]
    got_N = _fma_fp32(*(torch.tensor(column, dtype=FP32) for column in zip(*operands)))
    torch.testing.assert_close(got_N, torch.tensor(want), equal_nan=True)


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(name: str, weighted: bool) -> None:
    case = SPECIAL[name]
    inputs = [torch.randn(len(case.slot_of_row()), 2, dtype=FP64, requires_grad=True)]
    if weighted:
        inputs.append(torch.randn(case.num_tokens, case.top_k, dtype=FP64, requires_grad=True))
    reduction = random.choice(["slot", "expert", RankTree(case.num_experts, "fp64")])
    for unpermute in (tokenyard.unpermute, tokenyard.unpermute_reference):
        assert torch.autograd.gradcheck(
            lambda *inputs: unpermute(inputs[0], case.route(), *inputs[1:], reduction=reduction),  # noqa: B023
            inputs,
        )


@pytest.mark.parametrize("num_tokens, size, num_experts, top_k", [*SHAPES, (0, 8, 6, 2)])
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_equal_the_loops(
    num_tokens: int, size: int, num_experts: int, top_k: int
) -> None:
    """d_weights of small integers, whose sums are exact in any order; NaN in every padding row."""
    case = random_case(num_tokens, num_experts, top_k, row_alignment=2)
    for dtype, weight_dtype in ((BF16, FP32), (torch.float16, torch.float16), (FP32, BF16)):
        rows_RH = integers(len(case.slot_of_row()), size, dtype=dtype)
        rows_RH[case.padding()] = float("nan")
        weights_TK = wide(num_tokens, top_k, dtype=weight_dtype)
        want_d_rows_RH = torch.zeros_like(rows_RH)
        want_d_weights_TK = torch.zeros(num_tokens, top_k, dtype=FP64)
        grad_TH = integers(num_tokens, size, dtype=dtype)
        for token, slots in enumerate(case.rows_of_token()):
            present = {k for k, _, _ in slots}
            weights_TK[token, [k for k in range(top_k) if k not in present]] = float("inf")
            for k, row, _ in slots:
                for h in range(size):
                    factor = np.float32(weights_TK[token, k].item())
                    product = np.float32(grad_TH[token, h].item()) * factor
                    want_d_rows_RH[row, h] = rounded(product, dtype)
                    want_d_weights_TK[token, k] += rows_RH[row, h].double() * grad_TH[token, h]
        rows_RH.requires_grad_()
        weights_TK.requires_grad_()
        out_TH = tokenyard.unpermute(rows_RH, case.route(), weights_TK)
        assert out_TH.isfinite().all()
        grads = torch.autograd.grad(out_TH, (rows_RH, weights_TK), grad_TH)
        assert (grads[0] == want_d_rows_RH).all() and grads[0].dtype == dtype
        assert_same_bits(grads[1], want_d_weights_TK.float().to(weight_dtype))
        (d_rows_RH,) = torch.autograd.grad(
            tokenyard.unpermute(rows_RH, case.route()), rows_RH, grad_TH
        )
        for row, slot in enumerate(case.slot_of_row()):
            want_H = torch.zeros(size, dtype=dtype) if slot < 0 else grad_TH[slot // top_k]
            assert_same_bits(d_rows_RH[row], want_H)


@pytest.mark.parametrize("reduction", ["slot", "expert", "expert_descending", RankTree(2), FMA])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_has_no_row_never_leaks(reduction: Reduction, bad: float) -> None:
    case = Case(((0, -1), (4, 1), (1, -1), (3, 3)), 2, 4, row_alignment=4, num_rows=8)
    rows_RH, weights_TK = torch.randn(8, 3), torch.rand(4, 2)
    rows_RH[case.padding()] = bad
    routed = {(token, k) for token, slots in enumerate(case.rows_of_token()) for k, _, _ in slots}
    absent = [(t, k) for t in range(4) for k in range(2) if (t, k) not in routed]
    for token, k in absent:
        weights_TK[token, k] = bad
    rows_RH.requires_grad_()
    weights_TK.requires_grad_()
    out_TH = tokenyard.unpermute(rows_RH, case.route(), weights_TK, reduction=reduction)
    out_TH.sum().backward()
    assert rows_RH.grad is not None and weights_TK.grad is not None
    assert out_TH.isfinite().all() and (out_TH[3] == 0).all()
    assert rows_RH.grad.isfinite().all() and (rows_RH.grad[case.padding()] == 0).all()
    assert all(weights_TK.grad[token, k] == 0 for token, k in absent)


def test_strides_of_rows_weights_and_gradients() -> None:
    case = SPECIAL["aligned"]
    for rows_RH in (torch.randn(20, 9)[:, 3:6], torch.randn(3, 20).t(), torch.randn(20, 6)[:, ::2]):
        weights_TK = torch.rand(2, 4).t().requires_grad_()
        rows_RH = rows_RH.detach().requires_grad_()
        out_TH = tokenyard.unpermute(rows_RH, case.route(), weights_TK)
        plain = rows_RH.detach().contiguous(), weights_TK.detach().contiguous()
        assert_same_bits(out_TH, literal(plain[0], case, plain[1], "slot"))
        grad_TH = torch.randn(3, 4).t()
        grads = torch.autograd.grad(out_TH, (rows_RH, weights_TK), grad_TH)
        again = [value.requires_grad_() for value in plain]
        want_TH = tokenyard.unpermute_reference(again[0], case.route(), again[1])
        for got, want in zip(grads, torch.autograd.grad(want_TH, again, grad_TH.contiguous())):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "order",
    [("slot", 0, "fp32", "fp32"), ("expert", 2, "fp64", "fp64"), ("expert", 1, "fp32", "none")],
)
def test_opcheck(weighted: bool, order: tuple[str, int, str, str]) -> None:
    routing = SPECIAL["aligned"].route()
    dtype = BF16 if order[3] == "none" else FP32
    rows_RH = torch.randn(20, 3, dtype=dtype, requires_grad=True)
    weights_TK = torch.rand(4, 2, requires_grad=True) if weighted else None
    maps = routing.row_of_slot, routing.slot_of_row
    arguments = (rows_RH, weights_TK, *maps, routing.topk_indices, 4, *order)
    torch.library.opcheck(torch.ops.tokenyard.unpermute.default, arguments)
    saved = (rows_RH.detach(), torch.rand(4, 2)) if weighted else (None, None)
    arguments = (torch.randn(4, 3, dtype=dtype), *saved, *maps)
    torch.library.opcheck(torch.ops.tokenyard.unpermute_backward.default, arguments)


def test_compile_once_for_every_number_of_tokens() -> None:
    call = CALLS["unpermute, weights"]
    torch._dynamo.reset()  # compilations of a code object are counted
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 9, 16):
        routing = random_case(num_tokens, 3, 2).route()
        inputs = call.inputs(routing, FP32)
        stance = "default" if num_tokens == 5 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            out_TH = compiled(routing, *inputs)
            grad_TH = torch.randn_like(out_TH)
            grads = torch.autograd.grad(out_TH, inputs, grad_TH)
        want_TH = call(routing, *inputs)
        assert_same_bits(out_TH, want_TH)
        for got, want in zip(grads, torch.autograd.grad(want_TH, inputs, grad_TH)):
            assert_same_bits(got, want)


@pytest.mark.parametrize(
    "argument, changes",
    [
        ("rows", {"rows": torch.zeros(19, 3)}),
        ("rows", {"rows": torch.zeros(20)}),
        ("rows", {"rows": torch.zeros(20, 3, dtype=torch.int32)}),
        ("rows", {"rows": [[1.0]]}),
        ("rows", {"rows": torch.zeros(20, 3, dtype=FP64), "reduction": FMA}),
        ("routing", {"routing": torch.zeros(4)}),
        ("routing", {"rows": torch.zeros(20, 3, device="meta")}),
        ("topk_weights", {"topk_weights": torch.ones(4, 3)}),
        ("topk_weights", {"topk_weights": torch.ones(8)}),
        ("topk_weights", {"topk_weights": torch.ones(4, 2, dtype=torch.int64)}),
        ("topk_weights", {"topk_weights": torch.ones(4, 2, device="meta")}),
        ("topk_weights", {"topk_weights": 1.0}),
        ("topk_weights", {"topk_weights": None, "reduction": FMA}),
        ("reduction", {"reduction": "ascending"}),
        ("reduction", {"reduction": None}),
        (r"reduction\.ep_size", {"reduction": RankTree(3)}),
        (r"reduction\.ep_size", {"reduction": RankTree(0)}),
        (r"reduction\.within_rank", {"reduction": RankTree(2, "bf16")}),  # type: ignore[arg-type]
        (r"reduction\.across_ranks", {"reduction": RankTree(2, "fp32", "x")}),  # type: ignore[arg-type]
        (r"reduction\.ep_size", {"reduction": RankTree(2, "fp32", "none")}),
    ],
)
def test_errors_name_operator_and_argument(argument: str, changes: dict[str, object]) -> None:
    arguments = {"rows": torch.zeros(20, 3), "routing": SPECIAL["aligned"].route()}
    arguments |= {"topk_weights": torch.ones(4, 2)} | changes
    with pytest.raises(ArgumentError, match=rf"tokenyard\.unpermute: `{argument}`"):
        tokenyard.unpermute(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, FP64], ids=str)
@pytest.mark.parametrize("across", ["fp32", "fp64"])
@pytest.mark.parametrize("within", ["fp32", "fp64", "fma_bf16"])
def test_a_rank_tree_is_the_sum_of_its_partial_sums(
    dtype: torch.dtype, across: Any, within: Any
) -> None:
    """As two steps on two ranks: each adds up its own experts, then the partial sums are added."""
    if within == "fma_bf16" and dtype == FP64:
        return
    routing = random_case(9, 6, 4).route()
    rows_RH, weights_TK = wide(36, 5, dtype=dtype).requires_grad_(), torch.rand(9, 4)
    partials = []
    for rank in range(2):
        elsewhere_TK = routing.topk_indices // 3 != rank
        mine = replace(
            routing,
            row_of_slot=routing.row_of_slot.masked_fill(elsewhere_TK, -1),
            slot_of_row=routing.slot_of_row.masked_fill(routing.expert_of_row // 3 != rank, -1),
        )
        tree = RankTree(1, within, "none")
        partials.append(tokenyard.unpermute(rows_RH, mine, weights_TK, reduction=tree))
    wanted = BF16 if within == "fma_bf16" else FP64 if dtype == FP64 else FP32
    assert all(partial.dtype == wanted for partial in partials)
    ranks = tokenyard.route(torch.arange(2).expand(9, 2), 2)
    got_TH = tokenyard.unpermute(
        torch.cat(partials).to(FP64 if dtype == FP64 else FP32),
        ranks,
        reduction=RankTree(2, "fp32", across),
    ).to(dtype)
    want_TH = tokenyard.unpermute(
        rows_RH, routing, weights_TK, reduction=RankTree(2, within, across)
    )
    assert_same_bits(got_TH, want_TH)
    if within == "fma_bf16" and dtype != BF16:
        return  # the gradient of a partial sum in bf16 is in bf16
    grad_TH = torch.randn(9, 5).to(dtype)
    for got, want in zip(
        torch.autograd.grad(got_TH, rows_RH, grad_TH),
        torch.autograd.grad(want_TH, rows_RH, grad_TH),
    ):
        assert_same_bits(got, want)
