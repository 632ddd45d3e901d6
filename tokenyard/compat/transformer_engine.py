"""Drop-in for `transformer_engine.pytorch.permutation` and `transformer_engine.pytorch.router`.

T tokens, H hidden size, E experts, K experts per token, R rows of the permuted buffer. Rows are grouped
by expert, and in token order within an expert.

mask map    routing_map [T,E] 0/1 -> row_id_map [T,2E+1] int32: a token's n rows descending, from column E
            on their experts, n in the last column; other cells are -1 (the peer leaves them unwritten)
index map   routing_map [T,K] expert ids -> row_id_map [K*T] int32: row of slot (t,k) at k*T + t, or -1

As the peer, but defined where it is not:
- plain tensors of any float dtype on any device; its quantized tensor classes are not taken
- a map with more routed pairs than `num_out_tokens`: the tail (highest experts) gets no row, adds nothing
  and has gradient zero; with fewer: the rows left over are zero, and their gradients are ignored
- probabilities at unrouted places are never read, and have gradient zero
- no tokens, nothing routed, and empty experts give results of the documented shapes, with gradients

`num_out_tokens` may be an int, a SymInt or a 0-dim CPU tensor; nothing then waits for a GPU. A negative
number means "drop nothing" and costs a host read of the map; so does a tensor on a GPU.
`topk` is an addition of this module: the most experts that any token has (more are dropped), when known.
Without it, a GPU works on maps of T*E entries.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from tokenyard import check, conventions
from tokenyard.compat.te_maps import (
    permute_with_weights,
    read_index_map,
    read_mask_map,
    route_ids,
    route_mask,
    slot_weights,
)
from tokenyard.compat.te_router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from tokenyard.ops.permute import permute
from tokenyard.ops.sort_chunks import sort_chunks
from tokenyard.ops.unpermute import unpermute
from tokenyard.routing import Routing

__all__ = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

MAP_TYPES = ("mask", "index")


def _name(function: str) -> str:
    return f"compat.transformer_engine.{function}"


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | Tensor = -1,
    max_token_num: int = -1,
    map_type: Literal["mask", "index"] = "mask",
    *,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy every token to the rows of its experts: (output [R,H] dtype of inp, row_id_map).

    inp             [T,H] any dtype and strides
    routing_map     "mask": [T,E] bool or any integer dtype, any strides, routed where not 0;
                    "index": [T,K] ids, any integer dtype; a negative id has no row
    num_out_tokens  R; for the index map 0 and negative numbers mean T*K
    max_token_num   ignored: there is no workspace
    map_type        "mask" or "index"

    Differentiable in inp: the fp32 sum over a token's rows, rounded once.
    Peer: sorts ids of -1 to the tail and gives them rows if `num_out_tokens` allows it.
    """
    name = _name("moe_permute")
    check.choice(name, "map_type", map_type, MAP_TYPES)
    if map_type == "mask":
        routing = _route(name, inp, routing_map, num_out_tokens, topk)
        return permute(inp, routing), conventions.to_mask_map(routing)
    check.tensor(name, "routing_map", routing_map, ["T", "K"], dtypes=check.INTEGER_DTYPES)
    check.at_least(name, "routing_map.shape[1]", routing_map.shape[1], 1)
    check.tensor(name, "inp", inp, [routing_map.shape[0], "H"], device=routing_map.device)
    routing = route_ids(routing_map, num_out_tokens)
    return permute(inp, routing), conventions.to_row_id_map(routing)


def _route(
    function: str,
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | Tensor,
    topk: int | None,
    row_alignment: int = 1,
) -> Routing:
    routing = route_mask(routing_map, num_out_tokens, topk, row_alignment)
    check.tensor(function, "inp", inp, [routing.num_tokens, "H"], device=routing.device)
    return routing


def moe_permute_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | Tensor = -1,
    *,
    topk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe_permute` of a mask, with probabilities: (output [R,H], permuted_probs [R], row_id_map).

    inp             [T,H]
    probs           [T,E] any float dtype, kept; only its routed entries are read
    routing_map     [T,E] bool or any integer dtype, any strides
    num_out_tokens  R

    A routed pair with probability exactly 0 gives a zero row (so is padding marked), which passes no
    gradient to inp. Peer: adds that row's gradient to the token's, though the row does not depend on it.
    Differentiable in inp and probs; the gradient of probs is [T,E], zero where not routed.
    """
    name = _name("moe_permute_with_probs")
    routing = _route(name, inp, routing_map, num_out_tokens, topk)
    weights = slot_weights(name, "probs", probs, routing)
    output, permuted_probs = permute_with_weights(inp, weights, routing)
    return output, permuted_probs, conventions.to_mask_map(routing)


def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor,
    align_size: int,
    *,
    topk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """As `moe_permute_with_probs`, each expert's rows being padded to a multiple of `align_size`.

    inp, probs, routing_map  as there; nothing is dropped
    tokens_per_expert        [E] integers, the routed pairs of each expert; on the CPU nothing waits for a
                             GPU, on a GPU it is read on the host: R depends on it, and so does the 4th
                             result
    align_size               at least 1

    Returns output [R,H], permuted_probs [R], row_id_map [T,2E+1] (its rows do not count the padding),
    pad_offsets [E] int64 (padding rows before each expert; None when nothing needs padding) and
    target_tokens_per_expert [E] int64. Padding rows are zero, at the end of each expert; an expert
    without tokens has none. Counts are aligned in integers. Peer: in floating point.
    """
    name = _name("moe_permute_and_pad_with_probs")
    check.tensor(name, "tokens_per_expert", tokens_per_expert, ["E"], dtypes=check.INTEGER_DTYPES)
    check.at_least(name, "align_size", align_size, 1)
    counts = tokens_per_expert.long()
    target = (counts + (align_size - 1)) // align_size * align_size
    num_rows, num_pairs = torch.stack([target.sum(), counts.sum()]).tolist()
    routing = _route(name, inp, routing_map, num_rows, topk, align_size)
    weights = slot_weights(name, "probs", probs, routing)
    output, permuted_probs = permute_with_weights(inp, weights, routing)
    counts = counts.to(inp.device, non_blocking=True)
    target = target.to(inp.device, non_blocking=True)
    if num_rows == num_pairs:
        return output, permuted_probs, conventions.to_mask_map(routing), None, target
    padding = target - counts
    pad_offsets = padding.cumsum(0) - padding
    experts, rows = routing.topk_indices, routing.row_of_slot
    unpadded = torch.where(rows >= 0, rows - pad_offsets[experts.clamp(min=0).long()], -1)
    unpadded_routing = replace(routing, row_of_slot=unpadded.to(torch.int32))
    return output, permuted_probs, conventions.to_mask_map(unpadded_routing), pad_offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: Literal["mask", "index"] = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    *,
    topk: int | None = None,
) -> Tensor:
    """Sum the rows of each token, weighted if probabilities are given: [T,H], dtype of inp.

    inp            [R,H] rows, as `moe_permute` and its kin made them
    row_id_map     the map that they returned with the rows, or the peer's own
    merging_probs  "mask": [T,E], only its routed entries being read; "index": [T,K]; any float dtype
    restore_shape  (T, H), which must agree with the map; for an index map without probabilities it tells
                   T (`topk` tells K as well), else K is 1 as for the peer
    map_type       "mask" or "index", as for `moe_permute`
    probs          deprecated name of merging_probs
    pad_offsets    [E] of `moe_permute_and_pad_with_probs`, for a mask map

    Sums in fp32 (fp64 for fp64), in descending expert order for a mask map and in slot order for an index
    map, and rounds once. Peer: the index map accumulates in the dtype of inp; without restore_shape
    it takes T to be R and reads past the map; without rows it returns no tokens, instead of T zeros.
    Differentiable in inp and merging_probs, whose gradient is zero where not routed or dropped.
    """
    name = _name("moe_unpermute")
    check.choice(name, "map_type", map_type, MAP_TYPES)
    check.tensor(name, "inp", inp, ["R", "H"], dtypes=check.FLOAT_DTYPES)
    if probs is not None:
        if merging_probs is not None:
            check.fail(name, "probs", "None beside `merging_probs`, its new name", "both")
        warnings.warn("`probs` is called `merging_probs` now", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    weights = merging_probs
    if map_type == "mask":
        routing, experts = read_mask_map(name, row_id_map, inp.shape[0], topk, pad_offsets)
        if merging_probs is not None:
            shape = [routing.num_tokens, row_id_map.shape[1] // 2]
            check.tensor(
                name,
                "merging_probs",
                merging_probs,
                shape,
                dtypes=check.FLOAT_DTYPES,
                device=inp.device,
            )
            weights = merging_probs.gather(1, experts)
    else:
        if pad_offsets is not None:
            check.fail(name, "pad_offsets", "None, for an index map", check.describe(pad_offsets))
        if merging_probs is not None:
            check.tensor(
                name, "merging_probs", merging_probs, ["T", "K"], dtypes=check.FLOAT_DTYPES
            )
            topk = merging_probs.shape[1]
        elif topk is None:
            num_tokens = 0 if restore_shape is None else restore_shape[0]
            topk = max(row_id_map.shape[0] // num_tokens, 1) if num_tokens else 1
        routing = read_index_map(row_id_map, inp.shape[0], topk)
    shape = [routing.num_tokens, inp.shape[1]]
    if restore_shape is not None and list(restore_shape) != shape:
        check.fail(name, "restore_shape", f"{shape}, as the map has it", list(restore_shape))
    return unpermute(inp, routing, weights)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Put the chunks of inp [N,H] into the given order: -> [N,H].

    split_sizes   [C] integers, on the CPU or the device of inp; rows past their sum stay where they are
    sorted_index  [C] integers, a permutation: the chunk that comes first, second, ...

    No host sync. Differentiable in inp.
    """
    return sort_chunks(inp, split_sizes, sorted_index)


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """`moe_sort_chunks_by_index` of inp [N,H] and, in the same way, of probs [N]: both results.

    split_sizes, sorted_index  as there. Differentiable in inp and probs.
    """
    check.tensor(
        _name("moe_sort_chunks_by_index_with_probs"),
        "probs",
        probs,
        [inp.shape[0]],
        device=inp.device,
    )
    return (
        sort_chunks(inp, split_sizes, sorted_index),
        sort_chunks(probs, split_sizes, sorted_index),
    )
