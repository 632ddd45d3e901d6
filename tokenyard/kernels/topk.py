"""topk: score, choose, normalise and scale in one pass over the logits, forward and backward.

forward    T * E logits read, T * K weights and ids written
backward   T * E logits read, T * E gradients written, T * K ids and gradients read
A program holds some tokens with all their logits. The K choices are made one after the other: the
highest of 32-bit integers that order as the scores do, so no bit of a score is lost, then the lowest id
that has it. The ids pass through memory (the cache) to the layout in which weights are computed.
Logits stand in groups, [TOKENS, GROUPS * MEMBERS], each group padded to a power of two.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.device.scores import (
    EXCLUDED,
    cap,
    highest_id,
    members_of_best_groups,
    norm_of,
    ordered,
    power,
    quarters,
    score,
    sort_quarters,
    sum_of_exp,
    through_cap,
)
from tokenyard.kernels.launch import Launcher
from tokenyard.kernels.tiles import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_kernel(
    logits_ptr,
    bias_ptr,
    given_ptr,
    weights_ptr,
    indices_ptr,
    num_tokens,
    softcap,
    norm_p,
    eps,
    scale,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    CAPPED: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SUM_OF_TOP2: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CLAMP: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    position = tl.arange(0, GROUPS * MEMBERS)
    group_size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    expert = position // MEMBERS * group_size + position % MEMBERS
    real = (position % MEMBERS < group_size) & (position // MEMBERS < NUM_GROUPS)
    first_logit = logits_ptr + tokens.to(tl.int64) * LOGITS_STRIDE
    first_slot = tokens.to(tl.int64) * TOP_K
    largest = tl.zeros((TOKENS,), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32) + 1.0
    if given_ptr is None or SCORE == "softmax":
        mask = present[:, None] & real[None, :]
        z = tl.load(first_logit[:, None] + expert[None, :], mask=mask, other=float("-inf"))
        z = tl.where(real[None, :], cap(z, softcap, CAPPED), float("-inf"))
        if SCORE == "softmax":
            largest, total = sum_of_exp(z, 1)

    if given_ptr is None:
        # without bias and groups the logits order as their scores do, and more finely
        by_logit: tl.constexpr = (bias_ptr is None and TOPK_GROUPS == 0) or (
            SCORE == "softmax_of_selected"
        )
        choice = z
        if not by_logit:
            choice = score(z, largest[:, None], total[:, None], SCORE)
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + expert, mask=real, other=0).to(tl.float32)[None, :]
        choice = tl.where(real[None, :] & (choice == choice), choice, float("-inf"))
        keys = tl.where(real[None, :], ordered(choice), EXCLUDED)
        if TOPK_GROUPS > 0:
            keys = members_of_best_groups(
                keys,
                choice,
                TOPK_GROUPS,
                SUM_OF_TOP2,
                NUM_GROUPS,
                group_size,
                TOKENS,
                GROUPS,
                MEMBERS,
            )
        # quarters sorted in registers: each choice looks at the first of four, then moves them up
        ids = tl.broadcast_to(expert[None, :], (TOKENS, GROUPS * MEMBERS))
        k0, k1, k2, k3 = quarters(keys, TOKENS, GROUPS * MEMBERS)
        i0, i1, i2, i3 = quarters(ids, TOKENS, GROUPS * MEMBERS)
        k0, k1, k2, k3, i0, i1, i2, i3 = sort_quarters(k0, k1, k2, k3, i0, i1, i2, i3)
        for k in tl.static_range(TOP_K):
            found = highest_id(k0, i0)
            tl.store(indices_ptr + first_slot + k, found, mask=present)
            taken = i0 == found[:, None]
            k0, i0 = tl.where(taken, k1, k0), tl.where(taken, i1, i0)
            k1, i1 = tl.where(taken, k2, k1), tl.where(taken, i2, i1)
            k2, i2 = tl.where(taken, k3, k2), tl.where(taken, i3, i2)
            k3 = tl.where(taken, EXCLUDED, k3)
        tl.debug_barrier()  # the ids are read again, in another layout

    # the chosen logits come from the cache again
    slots = tl.arange(0, SLOTS)
    held = present[:, None] & (slots < TOP_K)[None, :]
    at = first_slot[:, None] + slots[None, :]
    if given_ptr is None:
        ids = tl.load(indices_ptr + at, mask=held, other=-1)
    else:
        given = tl.load(given_ptr + at, mask=held, other=0).to(tl.int64)
        ids = tl.where(held & (given >= 0) & (given < NUM_EXPERTS), given, -1).to(tl.int32)
        tl.store(indices_ptr + at, ids, mask=held)
    chosen = ids >= 0
    zk = tl.load(first_logit[:, None] + ids, mask=chosen, other=float("-inf"))
    zk = tl.where(chosen, cap(zk, softcap, CAPPED), float("-inf"))
    if SCORE == "softmax_of_selected":
        largest, total = sum_of_exp(zk, 1)
    s = tl.where(chosen, score(zk, largest[:, None], total[:, None], SCORE), 0.0)
    if NORMALIZE != "none":
        s = s / norm_of(s, norm_p, eps, NORMALIZE, CLAMP)[:, None]
    tl.store(weights_ptr + at, s * scale, mask=held)


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_backward_kernel(
    d_weights_ptr,
    logits_ptr,
    indices_ptr,
    d_logits_ptr,
    num_tokens,
    softcap,
    norm_p,
    eps,
    scale,
    NUM_EXPERTS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    CAPPED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CLAMP: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    expert = tl.arange(0, EXPERTS)
    mask = present[:, None] & (expert < NUM_EXPERTS)[None, :]
    first_logit = logits_ptr + tokens.to(tl.int64) * LOGITS_STRIDE
    largest = tl.zeros((TOKENS,), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32) + 1.0
    if SCORE == "softmax":
        logits = tl.load(first_logit[:, None] + expert[None, :], mask=mask, other=float("-inf"))
        z = tl.where(mask, cap(logits, softcap, CAPPED), float("-inf"))
        largest, total = sum_of_exp(z, 1)

    slots = tl.arange(0, SLOTS)
    held = present[:, None] & (slots < TOP_K)[None, :]
    at = tokens.to(tl.int64)[:, None] * TOP_K + slots[None, :]
    ids = tl.load(indices_ptr + at, mask=held, other=-1)
    chosen = ids >= 0
    logits_k = tl.load(first_logit[:, None] + ids, mask=chosen, other=float("-inf"))
    zk = tl.where(chosen, cap(logits_k, softcap, CAPPED), float("-inf"))
    if SCORE == "softmax_of_selected":
        largest, total = sum_of_exp(zk, 1)
    s = tl.where(chosen, score(zk, largest[:, None], total[:, None], SCORE), 0.0)
    d_s = tl.load(d_weights_ptr + at, mask=chosen, other=0).to(tl.float32) * scale
    if NORMALIZE != "none":
        norm = norm_of(s, norm_p, eps, NORMALIZE, CLAMP)
        d_norm = -tl.sum(d_s * s, 1) / (norm * norm)
        if NORMALIZE == "sum":
            d_norm = tl.where((eps == 0) & (tl.sum(s, 1) == 0), 0.0, d_norm)
        if CLAMP:
            d_norm = tl.where((eps > 0) & (norm <= eps), 0.0, d_norm)
        d_s = d_s / norm[:, None]
        if NORMALIZE == "sum":
            d_s += d_norm[:, None]
        else:
            raw = norm
            if not CLAMP:
                raw = norm - eps
            raw = tl.where(raw == 0, 1.0, raw)
            ratio = power(tl.abs(s) / raw[:, None], norm_p - 1.0)
            d_s += d_norm[:, None] * tl.where(s > 0, ratio, tl.where(s < 0, -ratio, 0.0))
        d_s = tl.where(chosen, d_s, 0.0)

    # every logit but the chosen ones: d_z = -p * <d_s, s> under softmax, else zero
    dot = tl.sum(d_s * s, 1)
    d_z = tl.zeros((TOKENS, EXPERTS), tl.float32)
    if SCORE == "softmax":
        d_z -= score(z, largest[:, None], total[:, None], SCORE) * dot[:, None]
        d_z = through_cap(d_z, z, logits, softcap, CAPPED)
    out = d_logits_ptr + tokens.to(tl.int64)[:, None] * NUM_EXPERTS
    tl.store(out + expert[None, :], d_z.to(d_logits_ptr.dtype.element_ty), mask=mask)

    # the chosen ones; an id that is given twice gets the sum of both, twice
    same = (ids[:, :, None] == ids[:, None, :]).to(tl.float32)
    d_s = tl.sum(same * d_s[:, None, :], 2)
    if SCORE == "softmax":
        d_zk = s * (d_s - dot[:, None])
    elif SCORE == "softmax_of_selected":
        count = tl.sum(same, 2)
        d_zk = s * (d_s - count * dot[:, None])
    elif SCORE == "sigmoid":
        d_zk = d_s * s * (1.0 - s)
    elif SCORE == "sqrtsoftplus":
        slope = 1.0 / ((1.0 + tl.exp(-zk)) * 2.0 * tl.where(s == 0, 1.0, s))
        d_zk = d_s * tl.where(s == 0, 0.0, slope)
    else:
        d_zk = d_s
    d_zk = through_cap(d_zk, zk, logits_k, softcap, CAPPED)
    tl.debug_barrier()  # after the store above
    tl.store(out + ids, d_zk.to(d_logits_ptr.dtype.element_ty), mask=chosen)


def _tile(num_positions: int) -> tuple[int, int]:
    """(tokens, num_warps): one warp holds up to 1024 logits, so that no reduction leaves it."""
    tokens = max(1024 // num_positions, 1)
    return tokens, min(max(num_positions // 1024, 1), 8)


@cache
def _forward_launcher(
    dtypes: tuple[torch.dtype | None, ...],
    num_experts: int,
    logits_stride: int,
    top_k: int,
    score: str,
    capped: bool,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    normalize: str,
    eps_mode: str,
) -> tuple[Launcher, int]:
    """The launcher and its tokens a program."""
    groups = next_power_of_2(num_groups)
    members = max(next_power_of_2(num_experts // num_groups), 4)
    tokens, num_warps = _tile(groups * members)
    constants = {
        "NUM_EXPERTS": num_experts,
        "NUM_GROUPS": num_groups,
        "LOGITS_STRIDE": logits_stride,
        "TOP_K": top_k,
        "SLOTS": next_power_of_2(top_k),
        "SCORE": score,
        "CAPPED": capped,
        "TOPK_GROUPS": topk_groups if num_groups > 1 else 0,
        "SUM_OF_TOP2": group_score == "sum_of_top2",
        "NORMALIZE": normalize,
        "CLAMP": eps_mode == "clamp",
        "TOKENS": tokens,
        "GROUPS": groups,
        "MEMBERS": members,
    }
    return Launcher(_topk_kernel, constants, num_warps=num_warps), tokens


def topk(
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
    """(topk_weights [T,K] fp32, topk_indices [T,K] int32); the arguments of the definition."""
    num_tokens, num_experts = router_logits.shape
    weights = router_logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    indices = router_logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    if num_tokens == 0:
        return weights, indices
    if router_logits.stride(1) != 1 and num_experts > 1:
        router_logits = router_logits.contiguous()
    given_indices = None if given_indices is None else given_indices.contiguous()
    selection_bias = None if selection_bias is None else selection_bias.contiguous()
    launch, tokens = _forward_launcher(
        (
            router_logits.dtype,
            None if given_indices is None else given_indices.dtype,
            None if selection_bias is None else selection_bias.dtype,
        ),
        num_experts,
        router_logits.stride(0),
        top_k,
        score,
        softcap > 0,
        num_groups,
        topk_groups,
        group_score,
        normalize,
        eps_mode,
    )
    launch(
        cdiv(num_tokens, tokens),
        (router_logits, selection_bias, given_indices, weights, indices),
        (num_tokens, softcap, norm_p, eps, scale),
    )
    return weights, indices


@cache
def _backward_launcher(
    dtypes: tuple[torch.dtype, ...],
    num_experts: int,
    logits_stride: int,
    top_k: int,
    score: str,
    capped: bool,
    normalize: str,
    eps_mode: str,
) -> tuple[Launcher, int]:
    """The launcher and its tokens a program."""
    experts = next_power_of_2(num_experts)
    tokens, num_warps = _tile(experts)
    constants = {
        "NUM_EXPERTS": num_experts,
        "LOGITS_STRIDE": logits_stride,
        "TOP_K": top_k,
        "SLOTS": next_power_of_2(top_k),
        "SCORE": score,
        "CAPPED": capped,
        "NORMALIZE": normalize,
        "CLAMP": eps_mode == "clamp",
        "TOKENS": tokens,
        "EXPERTS": experts,
    }
    return Launcher(_topk_backward_kernel, constants, num_warps=num_warps), tokens


def topk_backward(
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
    """d_router_logits [T,E]."""
    num_tokens, num_experts = router_logits.shape
    d_logits = router_logits.new_empty(num_tokens, num_experts)
    if num_tokens == 0:
        return d_logits
    if router_logits.stride(1) != 1 and num_experts > 1:
        router_logits = router_logits.contiguous()
    d_weights = d_weights.contiguous()
    launch, tokens = _backward_launcher(
        (d_weights.dtype, router_logits.dtype),
        num_experts,
        router_logits.stride(0),
        topk_indices.shape[1],
        score,
        softcap > 0,
        normalize,
        eps_mode,
    )
    launch(
        cdiv(num_tokens, tokens),
        (d_weights, router_logits, topk_indices.contiguous(), d_logits),
        (num_tokens, softcap, norm_p, eps, scale),
    )
    return d_logits
