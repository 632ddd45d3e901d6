"""The drop-in for TransformerEngine's router, against the documented formulas in fp64."""

import math
from typing import Any

import pytest
import torch
from cases import assert_same_bits
from torch import Tensor
from torch.autograd import gradcheck

from tokenyard import ArgumentError
from tokenyard.compat import transformer_engine as te

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def scores_of(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if score_function == "sigmoid" else torch.log1p(logits.exp()).sqrt()


def best(values: list[float], count: int) -> list[int]:
    """The ids of the greatest, ties to the lowest id."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def formula(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The router, one token after the other; differentiable in logits, which are fp64."""
    probs = torch.zeros_like(logits)
    routing_map = torch.zeros(logits.shape, dtype=torch.bool)
    for t, z in enumerate(logits):
        after = score_function == "softmax" and not use_pre_softmax
        scores = z if after else scores_of(z, score_function)
        choice = scores if expert_bias is None else scores + expert_bias.double()
        values = choice.tolist()
        if group_topk:
            assert num_groups is not None
            size = len(values) // num_groups
            groups = [sorted(values[g * size :][:size], reverse=True) for g in range(num_groups)]
            sums = [sum(group[: topk // group_topk]) for group in groups]
            kept = best(sums, group_topk)
            values = [v if e // size in kept else -math.inf for e, v in enumerate(values)]
        ids = best(values, topk)
        weights = scores[ids].softmax(0) if after else scores[ids]
        if score_function != "softmax" and topk > 1:
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * (1.0 if scaling_factor is None else scaling_factor)
        probs = probs.index_put((torch.tensor(t), torch.tensor(ids)), weights)
        routing_map[t, ids] = True
    return probs, routing_map


GROUPS = [(None, None, 4), (4, 2, 4), (4, 2, 2), (2, 1, 3), (4, 4, 8), (None, None, 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("score_function", "use_pre_softmax"),
    [("softmax", True), ("softmax", False), ("sigmoid", False), ("sqrtsoftplus", False)],
)
def test_topk_with_score_function(
    score_function: str, use_pre_softmax: bool, groups: Any, dtype: torch.dtype
) -> None:
    num_groups, group_topk, topk = groups
    logits = (torch.arange(40 * 16).view(40, 16) * 0.37).sin().mul(3).to(dtype)
    logits = logits[:, torch.randperm(16)].requires_grad_()
    bias = torch.randn(16) if score_function != "softmax" else None
    arguments: dict[str, Any] = {
        "topk": topk,
        "use_pre_softmax": use_pre_softmax,
        "num_groups": num_groups,
        "group_topk": group_topk,
        "scaling_factor": 2.5,
        "score_function": score_function,
        "expert_bias": bias,
    }
    probs, routing_map = te.fused_topk_with_score_function(logits=logits, **arguments)
    exact = logits.detach().double().requires_grad_()
    want, want_map = formula(exact, **arguments)
    assert (probs.dtype, probs.shape, routing_map.dtype) == (dtype, logits.shape, torch.bool)
    assert torch.equal(routing_map, want_map)
    assert (probs[~routing_map] == 0).all()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(probs.double(), want, **tolerance)
    # a random gradient: the sum of normalised weights is constant
    grad = torch.randn(probs.shape).to(dtype)
    (d_logits,) = torch.autograd.grad(probs, logits, grad)
    (want_d,) = torch.autograd.grad(want, exact, grad.double())
    torch.testing.assert_close(d_logits.double(), want_d, **tolerance)


def test_groups_scored_by_three_or_more() -> None:
    """The sum of more than two decides; with two the other group would win."""
    logits = torch.tensor([[3.0, 3.0, -5.0, -5.0, 2.5, 2.5, 2.5, 2.5]])
    _, routing_map = te.fused_topk_with_score_function(
        logits, 4, False, 2, 1, None, "softmax", None
    )
    assert routing_map.tolist() == [[False] * 4 + [True] * 4]
    _, routing_map = te.fused_topk_with_score_function(
        logits, 2, False, 2, 1, None, "softmax", None
    )
    assert routing_map.tolist() == [[True, True] + [False] * 6]


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_a_large_bias_chooses_and_does_not_weigh(score_function: str) -> None:
    logits = torch.randn(6, 5)
    bias = torch.tensor([0.0, 1e9, 0.0, 1e9, 0.0])
    probs, routing_map = te.fused_topk_with_score_function(
        logits, 2, False, None, None, None, score_function, bias
    )
    assert routing_map.nonzero()[:, 1].view(6, 2).tolist() == [[1, 3]] * 6
    scores = scores_of(logits.double(), score_function)[:, [1, 3]]
    want = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(probs[:, [1, 3]].double(), want, rtol=1e-6, atol=1e-6)


def test_ties_and_leading_dimensions() -> None:
    probs, routing_map = te.fused_topk_with_score_function(
        torch.zeros(2, 3, 4), 2, True, None, None, None, "softmax", None
    )
    assert routing_map.tolist() == [[[True, True, False, False]] * 3] * 2
    assert_same_bits(probs, routing_map * 0.25)
    logits = torch.zeros(0, 4, requires_grad=True)
    probs, routing_map = te.fused_topk_with_score_function(
        logits, 2, False, None, None, None, "sigmoid", torch.zeros(4)
    )
    assert probs.shape == routing_map.shape == (0, 4)
    assert torch.autograd.grad(probs.sum(), logits)[0].shape == (0, 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_for_the_aux_loss(score_function: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(30, 11) * 3).to(dtype).requires_grad_()
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(
        logits=logits, topk=3, score_function=score_function
    )
    exact = logits.detach().double().requires_grad_()
    want = scores_of(exact, score_function)
    if score_function != "softmax":
        want = want / (want.sum(1, keepdim=True) + 1e-20)
    assert (scores.dtype, routing_map.dtype) == (torch.float32, torch.bool)
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-6)
    for t, row in enumerate(logits.tolist()):
        assert routing_map[t].nonzero().flatten().tolist() == sorted(best(row, 3))
    grad = torch.randn(scores.shape)
    (d_logits,) = torch.autograd.grad(scores, logits, grad)
    (want_d,) = torch.autograd.grad(want, exact, grad.double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(d_logits.double(), want_d, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [50, torch.tensor(50)])
def test_aux_loss(dtype: torch.dtype, count_dtype: torch.dtype, total: Any) -> None:
    probs = torch.rand(25, 8).to(dtype).requires_grad_()
    counts = torch.randint(0, 40, (8,)).to(count_dtype)
    loss = te.fused_moe_aux_loss(
        probs=probs,
        tokens_per_expert=counts,
        total_num_tokens=total,
        num_experts=4,
        topk=2,
        coeff=0.01,
    )
    factor = 0.01 * 4 / (2 * 50 * 50)
    want = sum(probs[t, e].item() * counts[e].item() for t in range(25) for e in range(8))
    assert (loss.dtype, loss.shape) == (dtype, ())
    torch.testing.assert_close(loss.item(), factor * want, rtol=TOLERANCE[dtype] * 5, atol=1e-6)
    (d_probs,) = torch.autograd.grad(loss, probs, torch.tensor(2.0, dtype=dtype))
    want_d = (2 * factor * counts.double()).expand(25, 8)
    torch.testing.assert_close(d_probs.double(), want_d, rtol=TOLERANCE[dtype] * 5, atol=1e-6)


def test_aux_loss_is_the_coefficient_when_balanced_and_zero_without_tokens() -> None:
    probs = torch.full((8, 4), 0.25)
    counts = torch.full((4,), 4)
    assert te.fused_moe_aux_loss(probs, counts, 8, 4, 2, 0.5).item() == 0.5
    empty = torch.zeros(0, 4, requires_grad=True)
    loss = te.fused_moe_aux_loss(empty, torch.zeros(4), 0, 4, 2, 0.5)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, empty)[0].shape == (0, 4)
    # N^2 K past 2^63
    loss = te.fused_moe_aux_loss(probs, counts, torch.tensor(2**32), 4, 2, 2.0**62)
    assert loss.item() == 16.0


def test_router_gradients_by_finite_differences() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        assert gradcheck(
            lambda z, s=score: te.fused_topk_with_score_function(
                z, 2, False, None, None, 1.5, s, None
            )[0],
            (logits,),
        )
        assert gradcheck(
            lambda z, s=score: te.fused_compute_score_for_moe_aux_loss(z, 2, s)[1], (logits,)
        )


def test_bad_arguments_are_named() -> None:
    logits = torch.randn(3, 4)
    calls: list[tuple[str, Any]] = [
        ("score_function", (logits, 2, False, None, None, None, "tanh", None)),
        ("expert_bias", (logits, 2, False, None, None, None, "softmax", torch.zeros(4))),
        ("num_groups", (logits, 2, False, None, 1, None, "softmax", None)),
    ]
    for argument, arguments in calls:
        with pytest.raises(ArgumentError, match=f"`{argument}`"):
            te.fused_topk_with_score_function(*arguments)
