"""Drop-in for `d9d.kernel.moe.permute_with_probs`: TransformerEngine's mask map, and the level below it.

T tokens, H hidden size, E experts, R rows of the permuted buffer; row_id_map is the mask map [T,2E+1].
What is defined here and not in the peer: see `tokenyard.compat.transformer_engine`. `topk` is likewise an
addition: the most experts that any token has, when known.

The sizes that the lower level takes again, beside the tensors that have them, must agree with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard import check, conventions
from tokenyard.compat import transformer_engine
from tokenyard.compat.te_maps import permute_with_weights, slot_weights
from tokenyard.ops.permute import permute
from tokenyard.ops.rows import gather_rows

__all__ = [
    "make_row_id_map",
    "moe_permute_with_probs",
    "moe_unpermute_mask",
    "permute_with_mask_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]


def moe_permute_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | Tensor = -1,
    *,
    topk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output [R,H], permuted_probs [R], row_id_map [T,2E+1] int32).

    inp             [T,H]
    probs           [T,E] any float dtype, kept
    routing_map     [T,E] bool or any integer dtype, any strides
    num_out_tokens  R; -1 drops nothing, and costs a host read of the map. Peer: fails on this default

    Differentiable in inp and probs.
    """
    return transformer_engine.moe_permute_with_probs(
        inp, probs, routing_map, num_out_tokens, topk=topk
    )


def moe_unpermute_mask(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    *,
    topk: int | None = None,
) -> Tensor:
    """Sum the rows of each token, weighted if probabilities are given: inp [R,H] -> [T,H].

    row_id_map     [T,2E+1]
    merging_probs  [T,E] any float dtype
    restore_shape  (T, H), which must agree with the map

    fp32 sums in descending expert order. Differentiable in inp and merging_probs.
    """
    return transformer_engine.moe_unpermute(
        inp, row_id_map, merging_probs, restore_shape, topk=topk
    )


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """The mask map of a mask [T,E]: [T,2E+1] int32, cells that the peer leaves unwritten being -1.

    num_tokens, num_experts  T and E
    """
    check.tensor(
        "compat.d9d.make_row_id_map", "routing_map", routing_map, [num_tokens, num_experts]
    )
    return conventions.to_mask_map(conventions.from_routing_map(routing_map))


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output [R,H], permuted_scale [R,S], permuted_probs [R]), the latter two None as their inputs.

    inp               [T,H] any dtype
    row_id_map        [T,2E+1]; rows past R are dropped
    probs             [T,E], or None; a routed pair with probability 0 gives a zero row of the output
    scale             [T,S] any dtype, or None
    num_tokens, num_experts, num_out_tokens, hidden_size, scale_hidden_dim    T, E, R, H, S

    Differentiable in inp, probs and scale, which the peer's is not.
    """
    name = "compat.d9d.permute_with_mask_map"
    check.tensor(name, "inp", inp, [num_tokens, hidden_size])
    check.tensor(name, "row_id_map", row_id_map, [num_tokens, 2 * num_experts + 1])
    routing = conventions.from_mask_map(row_id_map, num_rows=num_out_tokens)
    permuted_scale = permuted_probs = None
    if scale is not None:
        width = "S" if scale_hidden_dim is None else scale_hidden_dim
        check.tensor(name, "scale", scale, [num_tokens, width])
        permuted_scale = permute(scale, routing)
    if probs is None:
        return permute(inp, routing), permuted_scale, None
    weights = slot_weights(name, "probs", probs, routing)
    output, permuted_probs = permute_with_weights(inp, weights, routing)
    return output, permuted_scale, permuted_probs


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """(output [T,H], unpermuted_probs [T,E], zero where not routed, or None without permuted_probs).

    inp             [R,H]
    row_id_map      [T,2E+1]
    merging_probs   [T,E] weights of the sum, or None
    permuted_probs  [R], or None
    num_tokens, num_experts, hidden_size    T, E, H

    Differentiable in inp and both probabilities, which the peer's is not.
    """
    name = "compat.d9d.unpermute_with_mask_map"
    check.tensor(name, "row_id_map", row_id_map, [num_tokens, 2 * num_experts + 1])
    output = moe_unpermute_mask(inp, row_id_map, merging_probs, (num_tokens, hidden_size))
    if permuted_probs is None:
        return output, None
    check.tensor(name, "permuted_probs", permuted_probs, [inp.shape[0]])
    routing = conventions.from_mask_map(row_id_map, num_rows=inp.shape[0])
    of_slot = gather_rows(permuted_probs, routing.row_of_slot.flatten())
    experts = torch.where(routing.topk_indices >= 0, routing.topk_indices, num_experts).long()
    probs = permuted_probs.new_zeros(num_tokens, num_experts + 1)  # the last column takes the rest
    return output, probs.scatter(1, experts, of_slot.view(experts.shape))[:, :num_experts]


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of `unpermute_with_mask_map`: (of fwd_input [R,H], of merging_probs [T,E]).

    fwd_output_grad  [T,H]; the first result has its dtype
    row_id_map       [T,2E+1]
    fwd_input        [R,H]
    merging_probs    [T,E]; the second result has its dtype, and is zero where not routed
    num_tokens, num_experts, num_out_tokens, hidden_size    T, E, R, H

    Rows that no token owns get zero. Peer: leaves them unwritten.
    """
    name = "compat.d9d.unpermute_with_mask_map_bwd_with_merging_probs"
    check.tensor(name, "row_id_map", row_id_map, [num_tokens, 2 * num_experts + 1])
    check.tensor(name, "fwd_output_grad", fwd_output_grad, [num_tokens, hidden_size])
    check.tensor(name, "fwd_input", fwd_input, [num_out_tokens, hidden_size])
    dtype = torch.promote_types(fwd_output_grad.dtype, fwd_input.dtype)
    with torch.enable_grad():
        rows = fwd_input.detach().to(dtype).requires_grad_()
        probs = merging_probs.detach().requires_grad_()
        output = moe_unpermute_mask(rows, row_id_map, probs)
    d_rows, d_probs = torch.autograd.grad(output, (rows, probs), fwd_output_grad.to(dtype))
    return d_rows.to(fwd_output_grad.dtype), d_probs
