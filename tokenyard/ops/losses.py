"""Losses and updates that keep experts evenly loaded.

load balance   E * sum over e of f[e] * P[e]        1 when balanced; f[e] the share of the slots that
               chose e, P[e] the mean probability of e  (Fedus et al., 2021, eq. 4, with K choices)
z loss         mean over t of logsumexp(router_logits[t])^2                  (Zoph et al., 2022, eq. 5)
selection bias bias[e] += rate * sign(mean count - count[e])   (Wang et al., 2024; DeepSeek-V3 eq. 16)

Compositions of a few torch operators, differentiable and compilable as they are: nothing to register.
Counts are integer sums, so they do not depend on the order of additions.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import check

SCOPES = ("batch", "sequence", "global")


def load_balance_loss(
    router_probs: Tensor,
    topk_indices: Tensor,
    *,
    num_experts: int,
    scope: Literal["batch", "sequence", "global"] = "batch",
    sequence_length: int | None = None,
    token_mask: Tensor | None = None,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor:
    """The switch load-balance loss: a scalar in fp32 (fp64 for fp64), 1 when balanced.

    router_probs     [T,E] probabilities of all experts, such as router_logits.softmax(-1)
    topk_indices     [T,K] chosen experts; -1 and E mean none
    num_experts      E
    scope            shares f and P over the tokens of this "batch"; over each "sequence", then the
                     mean (T = sequences * sequence_length, token-major); or "global": f over the
                     ranks of `group`, P over this rank (average the gradients over the ranks)
    token_mask       [T] bool, false for tokens (such as padding) that do not count; a sequence without
                     any counts as 0 in the mean
    group            process group for "global"; None is the default group

    Hugging Face's loss of the same name is K times this one. Raises ArgumentError.
    """
    name = "load_balance_loss"
    check.at_least(name, "num_experts", num_experts, 1)
    check.tensor(name, "router_probs", router_probs, ["T", num_experts], dtypes=check.FLOAT_DTYPES)
    num_tokens = router_probs.shape[0]
    check.tensor(
        name,
        "topk_indices",
        topk_indices,
        [num_tokens, "K"],
        dtypes=check.INTEGER_DTYPES,
        device=router_probs.device,
    )
    check.at_least(name, "topk_indices.shape[1]", topk_indices.shape[1], 1)
    check.choice(name, "scope", scope, SCOPES)
    if group is not None and scope != "global":
        check.fail(name, "group", "None, unless the scope is 'global'", group)
    if token_mask is not None:
        dtypes = frozenset({torch.bool})
        check.tensor(
            name,
            "token_mask",
            token_mask,
            [num_tokens],
            dtypes=dtypes,
            device=router_probs.device,
        )
    if scope != "sequence":
        sequence_length = num_tokens
    elif sequence_length is None:
        check.fail(name, "sequence_length", "a number, for scope 'sequence'", None)
    else:
        check.at_least(name, "sequence_length", sequence_length, 1)
        check.multiple_of(name, "T", num_tokens, sequence_length, "sequence_length")
    if num_tokens == 0:
        sequence_length = 1

    probs = router_probs if router_probs.dtype == torch.float64 else router_probs.float()
    ids = topk_indices.long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    if token_mask is not None:
        probs = probs.masked_fill(~token_mask[:, None], 0)
        ids = ids.masked_fill(~token_mask[:, None], num_experts)
        tokens = token_mask.view(-1, sequence_length).sum(1, keepdim=True)
    else:
        tokens = torch.full(
            (num_tokens // sequence_length, 1), sequence_length, device=probs.device
        )
    ids = ids.reshape(-1, sequence_length * ids.shape[1])
    counts = torch.zeros(ids.shape[0], num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(1, ids, torch.ones_like(ids))[:, :num_experts]
    mean_probs = probs.view(-1, sequence_length, num_experts).sum(1) / tokens.clamp(min=1)
    if scope == "global":
        counts = counts.sum(0, keepdim=True)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(counts, group=group)
        if num_tokens == 0:
            return probs.sum()
    share = counts.to(probs.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    per_sequence = num_experts * (share * mean_probs).sum(1)
    return per_sequence.sum() / max(per_sequence.shape[0], 1)


def z_loss(router_logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Mean square of the logits' log-sum-exp over tokens: [T,E] -> a scalar in fp32 (fp64 for fp64).

    router_logits   [T,E]
    token_mask      [T] bool, false for tokens that do not count

    Raises ArgumentError.
    """
    check.tensor("z_loss", "router_logits", router_logits, ["T", "E"], dtypes=check.FLOAT_DTYPES)
    logits = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    if token_mask is None:
        return logits.logsumexp(1).square().sum() / max(logits.shape[0], 1)
    dtypes = frozenset({torch.bool})
    check.tensor(
        "z_loss",
        "token_mask",
        token_mask,
        [logits.shape[0]],
        dtypes=dtypes,
        device=logits.device,
    )
    # masked before and after: a masked token may hold NaN, and log(E) is not zero
    square = logits.masked_fill(~token_mask[:, None], 0).logsumexp(1).square()
    return square.masked_fill(~token_mask, 0).sum() / token_mask.sum().clamp(min=1)


@torch.no_grad()
def update_selection_bias(
    selection_bias: Tensor,
    tokens_per_expert: Tensor,
    *,
    rate: float = 1e-3,
    group: "dist.ProcessGroup | None" = None,
    reduce: bool = False,
) -> None:
    """Move the selection bias [E] towards balance, in place: +rate below the mean count, -rate above.

    selection_bias      [E], changed in place
    tokens_per_expert   [E] integers, counts of the step (summed over its micro-batches)
    reduce, group       sum the counts over the ranks of `group` (None: the default group) first

    Exact integer comparison, so every rank and run takes the same step. Raises ArgumentError.
    """
    name = "update_selection_bias"
    check.tensor(name, "selection_bias", selection_bias, ["E"], dtypes=check.FLOAT_DTYPES)
    check.tensor(
        name,
        "tokens_per_expert",
        tokens_per_expert,
        list(selection_bias.shape),
        dtypes=check.INTEGER_DTYPES,
        device=selection_bias.device,
    )
    if group is not None and not reduce:
        check.fail(name, "group", "None, unless `reduce` is true", group)
    counts = tokens_per_expert.long()
    if reduce:
        counts = counts.clone()
        dist.all_reduce(counts, group=group)
    below_mean = (counts.sum() - counts * counts.numel()).sign()
    selection_bias.add_(below_mean.to(selection_bias.dtype), alpha=rate)
