"""Drop-in for `transformer_engine.pytorch.router`; `tokenyard.compat.transformer_engine` has its names.

T tokens (all leading dimensions of the logits), E experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from tokenyard import check
from tokenyard.ops.rows import accumulation_dtype
from tokenyard.ops.topk import topk as choose

_EPS = 1e-20  # what the peer adds to the sum of scores


def _name(function: str) -> str:
    return f"compat.transformer_engine.{function}"


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts: (probs, zero where not routed, dtype of logits; routing_map bool).

    logits           [...,E], and so are both results
    topk             K
    use_pre_softmax  softmax over all experts, then top-k; else over the chosen ones
    num_groups       with group_topk: experts form that many groups, of which `group_topk` stay,
    group_topk       scored by the sum of their topk // group_topk best (the best one, if that is 0)
    scaling_factor   factor of every probability; None is 1
    score_function   "softmax", "sigmoid" or "sqrtsoftplus"; the latter two are divided by the sum over
                     the chosen experts plus 1e-20, unless topk is 1
    expert_bias      [E] added to the sigmoid or sqrtsoftplus scores for the choice alone

    Computed in fp32, rounded once; ties go to the lowest id, NaN logits come last. Differentiable in
    logits. Peer: recovers a chosen score by subtracting the bias again, so a large bias wipes it out.
    """
    name = _name("fused_topk_with_score_function")
    flat, score = _scored(name, logits, score_function, expert_bias)
    options: dict[str, Any] = {"score": score, "dtype": logits.dtype}
    options["scale"] = 1.0 if scaling_factor is None else float(scaling_factor)
    if score != "softmax":
        options |= {"normalize": "sum" if topk > 1 else "none", "eps": _EPS}
    elif not use_pre_softmax:
        options["score"] = "softmax_of_selected"
    if group_topk:
        if not num_groups:
            check.fail(name, "num_groups", "a number, with `group_topk`", num_groups)
        summed = max(topk // group_topk, 1)
        if summed <= 2:
            options |= {"num_groups": num_groups, "topk_groups": group_topk}
            options["group_score"] = "max" if summed == 1 else "sum_of_top2"
        else:
            selection = score if score != "softmax" or use_pre_softmax else "identity"
            options["topk_indices"] = _choose_in_groups(
                flat, topk, selection, expert_bias, num_groups, group_topk, summed
            )
    if "topk_indices" not in options and expert_bias is not None:
        options["selection_bias"] = expert_bias
    weights, indices = choose(flat, topk, **options)
    probs = torch.zeros_like(flat).scatter(1, indices.long(), weights)
    return probs.view(logits.shape), _mask(indices, flat).view(logits.shape)


def _scored(
    function: str, logits: Tensor, score_function: str, expert_bias: Tensor | None = None
) -> tuple[Tensor, Any]:
    """(logits as [T,E], the operator's name of the score)."""
    scores = ("softmax", "sigmoid", "sqrtsoftplus")
    check.choice(function, "score_function", score_function, scores)
    check.tensor(function, "logits", logits, dtypes=check.FLOAT_DTYPES)
    check.at_least(function, "logits.dim()", logits.dim(), 1)
    if expert_bias is not None and score_function == "softmax":
        check.fail(function, "expert_bias", "None, for softmax", check.describe(expert_bias))
    return logits.reshape(-1, logits.shape[-1]), score_function


def _mask(indices: Tensor, logits: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices.long(), True)


def _scores_of_all(logits: Tensor, score: Any, **options: Any) -> Tensor:
    """[T,E] the scores of all experts, in the order of their ids."""
    num_tokens, num_experts = logits.shape
    ids = torch.arange(num_experts, device=logits.device).expand(num_tokens, -1)
    return choose(logits, num_experts, score=score, topk_indices=ids, **options)[0]


def _choose_in_groups(
    logits: Tensor,
    topk: int,
    score: Any,
    expert_bias: Tensor | None,
    num_groups: int,
    group_topk: int,
    summed: int,
) -> Tensor:
    """[T,K] ids, for groups scored by the sum of more than their two best."""
    scores = _scores_of_all(logits.detach(), score)
    if expert_bias is not None:
        scores = scores + expert_bias.detach()
    grouped = scores.unflatten(1, (num_groups, -1))
    best = grouped.topk(min(summed, grouped.shape[2]), dim=-1).values.sum(-1)
    groups = choose(best, group_topk, score="identity")[1]
    kept = _mask(groups, best)[:, :, None].expand(grouped.shape).flatten(1)
    return choose(scores.masked_fill(~kept, -torch.inf), topk, score="identity")[1]


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """What the load-balance loss needs: (routing_map bool, scores fp32), both shaped as logits.

    logits          [...,E]
    topk            K, experts that the map marks in each row; ties go to the lowest id
    score_function  "softmax", "sigmoid" or "sqrtsoftplus"; the latter two are divided by their sum over
                    all experts plus 1e-20

    Scores are fp64 for fp64 logits. Differentiable in logits.
    """
    flat, score = _scored(_name("fused_compute_score_for_moe_aux_loss"), logits, score_function)
    options = {} if score == "softmax" else {"normalize": "sum", "eps": _EPS}
    scores = _scores_of_all(flat, score, **options)
    indices = choose(flat.detach(), topk, score=score)[1]
    return _mask(indices, flat).view(logits.shape), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """The load-balance loss coeff * E / (K N^2) * sum over t, e of probs[t,e] * tokens_per_expert[e].

    probs              [T,C], C a multiple of num_experts (sequences side by side); any float dtype
    tokens_per_expert  [C] counts, any dtype
    total_num_tokens   N, an int, or a 0-dim tensor on any device (no host sync); 0 gives 0
    num_experts, topk  E and K

    A scalar in the dtype of probs, summed in fp32 without atomics. Peer: the order of its sum varies.
    Differentiable in probs.
    """
    name = _name("fused_moe_aux_loss")
    check.tensor(name, "probs", probs, ["T", "C"], dtypes=check.FLOAT_DTYPES)
    check.tensor(
        name, "tokens_per_expert", tokens_per_expert, [probs.shape[1]], device=probs.device
    )
    check.multiple_of(name, "probs.shape[1]", probs.shape[1], num_experts, "num_experts")
    acc = accumulation_dtype(probs.dtype)
    loss = (probs.to(acc).sum(0) * tokens_per_expert.detach().to(acc)).sum()
    factor = num_experts * coeff / topk
    if isinstance(total_num_tokens, Tensor):
        total = total_num_tokens.to(acc).clamp(min=1)
        return (loss * (factor / total / total)).to(probs.dtype)
    return (loss * (factor / max(total_num_tokens, 1) ** 2)).to(probs.dtype)
