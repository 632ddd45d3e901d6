"""Choose each token's experts and weigh them.

z      = softcap * tanh(router_logits / softcap)          where softcap is given; NaN counts as -inf
s      = score(z)        softmax over all experts, or over the chosen ones; sigmoid; sqrt(softplus); z
c      = s + selection_bias (or z + selection_bias)      experts are chosen by c, weighed by s
chosen = the K greatest c, ties to the lowest id, after all but `topk_groups` groups are set to -inf
u      = s[chosen] / norm                                 norm = sum or p-norm, eps added or a minimum
w      = scale * expert_scale[chosen] * u

d_s    = the quotient rule of u;   d_z = the derivative of the score;   zero where not chosen
Everything is computed in fp32 (fp64 for fp64 logits) and rounded once, to the dtype of the weights.
"""

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenyard import backend, check
from tokenyard.ops.rows import accumulation_dtype
from tokenyard.registration import Operator

SCORES = ("softmax", "softmax_of_selected", "sigmoid", "sqrtsoftplus", "identity")
GROUP_SCORES = ("max", "sum_of_top2")
NORMALIZATIONS = ("none", "sum", "norm")
EPS_MODES = ("add", "clamp")
CHOICES = ("score", "logit")

Score = Literal["softmax", "softmax_of_selected", "sigmoid", "sqrtsoftplus", "identity"]


def _cap(router_logits: Tensor, softcap: float) -> Tensor:
    """The logits z, finite or -inf."""
    z = router_logits.to(accumulation_dtype(router_logits.dtype))
    z = z.nan_to_num(nan=-torch.inf, posinf=torch.finfo(z.dtype).max, neginf=-torch.inf)
    if softcap == 0:
        return z
    return torch.where(z == -torch.inf, z, softcap * torch.tanh(z / softcap))


def _softmax(z: Tensor) -> Tensor:
    """Softmax of the last dimension; zeros, not NaN, where every logit is -inf."""
    empty = z.amax(-1, keepdim=True) == -torch.inf
    return F.softmax(z.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


def _elementwise_score(z: Tensor, score: str) -> Tensor:
    if score == "sigmoid":
        return z.sigmoid()
    if score == "sqrtsoftplus":
        square = F.softplus(z)
        return square.masked_fill(square == 0, 1).sqrt().masked_fill(square == 0, 0)
    return z


def _highest(values: Tensor, count: int) -> Tensor:
    """[...,count] the ids of the greatest values, in descending order, ties to the lowest id."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _select(
    z: Tensor,
    top_k: int,
    score: str,
    selection_bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> Tensor:
    """[T,K] int64 ids of the chosen experts."""
    if score == "softmax_of_selected" or (selection_bias is None and num_groups == 1):
        choice = z  # orders as every score does, without the ties of rounding and saturation
    else:
        choice = _softmax(z) if score == "softmax" else _elementwise_score(z, score)
    if selection_bias is not None:
        choice = choice + selection_bias.to(choice.dtype)
        choice = choice.masked_fill(choice.isnan(), -torch.inf)
    if num_groups > 1:
        grouped = choice.unflatten(1, (num_groups, -1))
        if group_score == "max":
            score_of_group = grouped.amax(-1)
        else:
            score_of_group = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(score_of_group, dtype=torch.bool)
        kept.scatter_(1, _highest(score_of_group, topk_groups), True)
        # a tie among -inf must still go to a kept group
        ids = (
            kept.repeat_interleave(grouped.shape[2], 1)
            .int()
            .argsort(dim=1, descending=True, stable=True)[:, : topk_groups * grouped.shape[2]]
        )
        return ids.gather(1, _highest(choice.gather(1, ids), top_k))
    return _highest(choice, top_k)


def _selected_scores(z: Tensor, ids: Tensor, score: str) -> Tensor:
    """[T,K] unnormalised scores of the chosen experts."""
    if score == "softmax":
        return _softmax(z).gather(1, ids)
    if score == "softmax_of_selected":
        return _softmax(z.gather(1, ids))
    return _elementwise_score(z.gather(1, ids), score)


def _norm(s: Tensor, normalize: str, norm_p: float, eps: float, eps_mode: str) -> Tensor:
    """[T,1] what the scores are divided by; 1 where that would be 0."""
    if normalize == "none":
        return torch.ones_like(s[:, :1])
    if normalize == "sum":
        norm = s.sum(1, keepdim=True)
    else:
        norm = torch.linalg.vector_norm(s, norm_p, dim=1, keepdim=True)
    norm = norm + eps if eps_mode == "add" else norm.clamp(min=eps) if eps > 0 else norm
    return norm.masked_fill(norm == 0, 1)


def _definition(
    router_logits: Tensor,
    given_indices: Tensor | None,
    top_k: int,
    score: str,
    softcap: float,
    selection_bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    normalize: str,
    norm_p: float,
    eps: float,
    eps_mode: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(topk_weights in the accumulation dtype, topk_indices int32)."""
    z = _cap(router_logits, softcap)
    if given_indices is None:
        ids = _select(z, top_k, score, selection_bias, num_groups, topk_groups, group_score)
        s = _selected_scores(z, ids, score)
    else:
        ids, s = _given_scores(z, given_indices, score)
    weights = s / _norm(s, normalize, norm_p, eps, eps_mode) * scale
    return weights, ids.to(torch.int32)


def _given_scores(z: Tensor, given_indices: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """Ids with -1 for "no expert", and their scores, zero there."""
    given = given_indices.long()
    absent = (given < 0) | (given >= z.shape[1])
    ids = given.masked_fill(absent, 0)
    if score == "softmax_of_selected":
        s = _softmax(z.gather(1, ids).masked_fill(absent, -torch.inf))
    else:
        s = _selected_scores(z, ids, score).masked_fill(absent, 0)
    return given.masked_fill(absent, -1), s


@functools.wraps(_definition)  # for the schema
def _forward(router_logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    kernels = backend.kernels("topk", router_logits)
    if kernels is not None:
        return kernels.topk(router_logits, *args)
    weights, indices = _definition(router_logits, *args)
    return weights.contiguous(), indices.contiguous()


def _fake(router_logits: Tensor, given_indices: Tensor | None, top_k: int, *args: Any) -> Any:
    shape = (router_logits.shape[0], top_k)
    dtype = accumulation_dtype(router_logits.dtype)
    weights = router_logits.new_empty(shape, dtype=dtype)
    return weights, router_logits.new_empty(shape, dtype=torch.int32)


def _backward(
    d_weights: Tensor,
    router_logits: Tensor,
    topk_indices: Tensor,
    score: str,
    softcap: float,
    normalize: str,
    norm_p: float,
    eps: float,
    eps_mode: str,
    scale: float,
) -> Tensor:
    """d_router_logits [T,E]; the scores are computed again, so that only logits and ids are saved."""
    kernels = backend.kernels("topk", router_logits)
    if kernels is not None:
        options = (score, softcap, normalize, norm_p, eps, eps_mode, scale)
        return kernels.topk_backward(d_weights, router_logits, topk_indices, *options)
    z = _cap(router_logits, softcap)
    ids, s = _given_scores(z, topk_indices, score)
    absent = ids < 0
    ids = ids.clamp(min=0)
    norm = _norm(s, normalize, norm_p, eps, eps_mode)
    d_u = (d_weights.to(z.dtype) * scale).masked_fill(absent, 0)
    d_s = d_u / norm
    if normalize != "none":
        d_norm = -(d_u * s).sum(1, keepdim=True) / (norm * norm)
        if normalize == "sum" and eps == 0:
            d_norm = d_norm.masked_fill(s.sum(1, keepdim=True) == 0, 0)
        if eps_mode == "clamp" and eps > 0:
            d_norm = d_norm.masked_fill(norm <= eps, 0)
        if normalize == "sum":
            d_s = d_s + d_norm
        else:
            raw = norm - eps if eps_mode == "add" else norm
            ratio = (s.abs() / raw.masked_fill(raw == 0, 1)).pow(norm_p - 1)
            d_s = d_s + d_norm * s.sign() * ratio
        d_s = d_s.masked_fill(absent, 0)

    if score == "softmax":
        d_z = torch.zeros_like(z).scatter_add_(1, ids, d_s)
        d_z = _softmax(z) * (d_z - (d_s * s).sum(1, keepdim=True))
    else:
        if score == "softmax_of_selected":
            d_zk = s * (d_s - (d_s * s).sum(1, keepdim=True))
        elif score == "sigmoid":
            d_zk = d_s * s * (1 - s)
        elif score == "sqrtsoftplus":
            slope = z.gather(1, ids).sigmoid() / (2 * s)
            d_zk = d_s * slope.masked_fill(s == 0, 0)
        else:
            d_zk = d_s
        d_z = torch.zeros_like(z).scatter_add_(1, ids, d_zk.masked_fill(absent, 0))
    if softcap > 0:
        d_z = d_z * (1 - (z / softcap).square())
    d_z = d_z.masked_fill(~router_logits.isfinite(), 0)
    return d_z.to(router_logits.dtype).contiguous()


def _backward_fake(d_weights: Tensor, router_logits: Tensor, *args: Any) -> Tensor:
    return router_logits.new_empty(router_logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    router_logits, _, _, score, softcap, *_ = inputs
    ctx.options = (score, softcap, *inputs[-5:])
    ctx.save_for_backward(router_logits, output[1])


def _gradient(ctx: Any, backward: Any, d_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return backward(d_weights, *ctx.saved_tensors, *ctx.options), *[None] * 13


_topk = Operator(
    "topk",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_backward_fake,
)


def _checked(
    operator: Any,
    router_logits: Tensor,
    top_k: int,
    *,
    score: Score,
    normalize: Literal["none", "sum", "norm"],
    norm_p: float,
    eps: float,
    eps_mode: Literal["add", "clamp"],
    scale: float,
    expert_scale: Tensor | None,
    logit_bias: Tensor | None,
    softcap: float | None,
    selection_bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
    group_score: Literal["max", "sum_of_top2"],
    choose_by: Literal["score", "logit"],
    topk_indices: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    check.tensor("topk", "router_logits", router_logits, ["T", "E"], dtypes=check.FLOAT_DTYPES)
    num_experts = router_logits.shape[1]
    check.at_least("topk", "top_k", top_k, 1)
    if top_k > num_experts:
        check.fail("topk", "top_k", f"at most E = {num_experts}", top_k)
    check.choice("topk", "score", score, SCORES)
    check.choice("topk", "normalize", normalize, NORMALIZATIONS)
    check.choice("topk", "eps_mode", eps_mode, EPS_MODES)
    check.choice("topk", "group_score", group_score, GROUP_SCORES)
    check.choice("topk", "choose_by", choose_by, CHOICES)
    for argument, number in (("eps", eps), ("norm_p", norm_p), ("scale", scale)):
        check.number("topk", argument, number)
    if softcap is not None:
        check.number("topk", "softcap", softcap)
    if not eps >= 0:
        check.fail("topk", "eps", "at least 0", eps)
    if not norm_p >= 1:
        check.fail("topk", "norm_p", "at least 1", norm_p)
    if softcap is not None and not softcap > 0:
        check.fail("topk", "softcap", "a positive number, or None", softcap)
    check.at_least("topk", "num_groups", num_groups, 1)
    check.multiple_of("topk", "router_logits.shape[1]", num_experts, num_groups, "num_groups")
    check.at_least("topk", "topk_groups", topk_groups, 1)
    if topk_groups > num_groups:
        check.fail("topk", "topk_groups", f"at most num_groups = {num_groups}", topk_groups)
    if top_k > topk_groups * (num_experts // num_groups):
        kept = topk_groups * (num_experts // num_groups)
        check.fail("topk", "top_k", f"at most the {kept} experts of the groups that stay", top_k)
    for argument, value in (
        ("expert_scale", expert_scale),
        ("logit_bias", logit_bias),
        ("selection_bias", selection_bias),
    ):
        if value is not None:
            check.tensor(
                "topk",
                argument,
                value,
                [num_experts],
                dtypes=check.FLOAT_DTYPES,
                device=router_logits.device,
            )
    if topk_indices is not None:
        check.tensor(
            "topk",
            "topk_indices",
            topk_indices,
            [router_logits.shape[0], top_k],
            dtypes=check.INTEGER_DTYPES,
            device=router_logits.device,
        )
    if dtype is not None:
        check.choice("topk", "dtype", dtype, sorted(check.FLOAT_DTYPES, key=str))
    acc = accumulation_dtype(router_logits.dtype)
    if logit_bias is not None:
        router_logits = router_logits.to(acc) + logit_bias.to(acc)
    softcap = 0.0 if softcap is None else float(softcap)
    selection = (
        None if selection_bias is None else selection_bias.detach(),
        num_groups,
        topk_groups,
        group_score,
    )
    if choose_by == "logit" and topk_indices is None:
        logits, plain = router_logits.detach(), ("none", 1.0, 0.0, "add", 1.0)
        _, topk_indices = operator(logits, None, top_k, "identity", softcap, *selection, *plain)
    weights, indices = operator(
        router_logits,
        topk_indices,
        top_k,
        score,
        softcap,
        *selection,
        normalize,
        float(norm_p),
        float(eps),
        eps_mode,
        float(scale),
    )
    if expert_scale is not None:
        factor = expert_scale.to(acc)[indices.clamp(min=0).long()]
        weights = weights * factor.masked_fill(indices < 0, 0)
    return (weights if dtype is None else weights.to(dtype)), indices


def topk(
    router_logits: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    normalize: Literal["none", "sum", "norm"] = "none",
    norm_p: float = 1.0,
    eps: float = 0.0,
    eps_mode: Literal["add", "clamp"] = "add",
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    logit_bias: Tensor | None = None,
    softcap: float | None = None,
    selection_bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: Literal["max", "sum_of_top2"] = "max",
    choose_by: Literal["score", "logit"] = "score",
    topk_indices: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts: router_logits [T,E] -> (topk_weights [T,K], topk_indices [T,K] int32).

    top_k           K, experts per token
    score           "softmax" over all experts, "softmax_of_selected" (top-k first), "sigmoid",
                    "sqrtsoftplus" or "identity"
    normalize       divide the K scores by their "sum" or their p-"norm" (`norm_p`), or by nothing;
    eps, eps_mode   `eps` is added to that sum, or is its minimum ("clamp")
    scale           factor of every weight; expert_scale [E] a learned factor per expert
    logit_bias      [E] added to the logits first; softcap: z -> softcap * tanh(z / softcap)
    selection_bias  [E] added to the scores for the choice alone, never part of a weight
    num_groups      experts form this many equal groups, of which the `topk_groups` with the highest
    group_score     score stay: the "max" of the group, or the "sum_of_top2"
    choose_by       what bias and groups are applied to: the "score", or the "logit" (in a kernel of its own)
    topk_indices    [T,K] choices given from outside (hash routing, replay); -1 or E means none and
                    has weight and gradient zero
    dtype           of the weights; default fp32, or fp64 for fp64 logits

    Experts come in descending order of score; ties go to the lowest id. A NaN logit counts as -inf, and a
    row with fewer than K finite scores still gets K distinct experts (weight zero for -inf under
    softmax and sigmoid). Differentiable in router_logits, expert_scale and logit_bias; saves logits
    and ids. Formulas of public models: see docs/routers.md. Raises ArgumentError.
    """
    return _checked(
        _topk,
        router_logits,
        top_k,
        score=score,
        normalize=normalize,
        norm_p=norm_p,
        eps=eps,
        eps_mode=eps_mode,
        scale=scale,
        expert_scale=expert_scale,
        logit_bias=logit_bias,
        softcap=softcap,
        selection_bias=selection_bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
        choose_by=choose_by,
        topk_indices=topk_indices,
        dtype=dtype,
    )


_DEFAULTS: dict[str, Any] = dict(topk.__kwdefaults__ or {})


def topk_reference(router_logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The definition of `topk`, with the same options; differentiated by autograd."""
    for option in options:
        check.choice("topk_reference", "options", option, sorted(_DEFAULTS))
    return _checked(_definition, router_logits, top_k, **{**_DEFAULTS, **options})
