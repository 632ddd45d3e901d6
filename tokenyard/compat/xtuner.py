"""Drop-in for `xtuner.v1.ops` (permute, unpermute, group_gemm) and `xtuner.v1.ops.moe.cuda`.

T tokens, H hidden size, E experts, K experts per token, R rows of the permuted buffer. Rows are grouped
by expert, ascending, and in token order within an expert: the same rows from either pair below, and the
same counts per expert. The maps, both called `row_id_map`, differ and are not to be mixed:

permute, cuda_token_permute    map B [K*T] int32, slot -> row: the row of slot (t,k) at k*T + t, -1 for none;
                               goes with unpermute, cuda_token_unpermute
cuda_token_permute_torch       map A [R] int64, row -> slot: the slot t*K + k of each row, -1 for none;
                               goes with cuda_token_unpermute_torch

The unpermute of the other pair raises an ArgumentError, by dtype, by length, and on the CPU by entries out
of range. It cannot be detected when a map of the right length has been cast to the other's dtype.

Both go with the grouped GEMMs, which see rows and counts only. From A to B: `conventions.from_sorted_slots`,
then `conventions.to_row_id_map`; from B to A: `from_row_id_map`, then `to_sorted_slots`.

As the peer, but defined where it is not:
- CPU tensors, fp32 and fp64 (never read as another dtype), any strides, any H
- sums in fp32 (fp64 for fp64 rows), k ascending, rounded once. Peer: adds up in the dtype of the rows
- for K = 1 the probabilities count and have a gradient. Peer: map B ignores them there
- under autocast the grouped GEMMs compute in its dtype
- an id of -1 has no row, whatever `num_negative_one_in_indices` says; it adds nothing, and its probability
  has gradient zero. Peer: map A gives it one of the first rows
- rows that no slot or no expert owns are zero; no tokens, nothing routed and empty experts give results of
  the documented shapes, with gradients. Peer: returns its argument, or memory that it did not write
Nothing waits for a GPU, but GEMMs without a kernel (fp64, or no Triton).

>>> import torch
>>> ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
>>> x = torch.arange(5.0)[:, None]
>>> rows, row_id_map = permute(x, ids)
>>> rows.flatten().tolist(), row_id_map.tolist()
([0.0, 1.0, 3.0, 0.0, 2.0, 3.0, 4.0, 1.0, 2.0, 4.0], [3, 7, 8, 2, 6, 0, 1, 4, 5, 9])
>>> rows, row_id_map = cuda_token_permute_torch(x, ids)
>>> rows.flatten().tolist(), row_id_map.tolist()
([0.0, 1.0, 3.0, 0.0, 2.0, 3.0, 4.0, 1.0, 2.0, 4.0], [1, 3, 6, 0, 5, 7, 8, 2, 4, 9])
"""

from typing import Any

import torch
from torch import Tensor

from tokenyard import check, conventions
from tokenyard.compat.grouped_gemm import (
    check_entries,
    combine,
    multiply,
    offsets_of,
    route_indices,
)
from tokenyard.compat.te_maps import all_rows
from tokenyard.ops.grouped_gemm import grouped_gemm
from tokenyard.ops.permute import permute as permute_rows
from tokenyard.ops.rows import autocast_dtype
from tokenyard.ops.unpermute import unpermute as unpermute_rows
from tokenyard.routing import Routing

__all__ = [
    "cuda_token_permute",
    "cuda_token_permute_torch",
    "cuda_token_unpermute",
    "cuda_token_unpermute_torch",
    "group_gemm",
    "k_grouped_gemm",
    "m_grouped_gemm",
    "permute",
    "unpermute",
]

TORCH_PAIR = "a map of cuda_token_permute_torch goes with cuda_token_unpermute_torch"
CUDA_PAIR = "a map of permute or cuda_token_permute goes with unpermute or cuda_token_unpermute"


def _name(function: str) -> str:
    return f"compat.xtuner.{function}"


def permute(
    input_act: Tensor,
    indices: Tensor,
    num_topK: int | None = None,
    num_out_tokens: int | Tensor | None = None,
    num_negative_one_in_indices: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy every token to the rows of its experts: (permuted [R,H], row_id_map [K*T] int32, map B).

    input_act       [T,H] any dtype and strides
    indices         [T,K] expert ids, any integer dtype, or [T] for K = 1; a negative id has no row
    num_topK        K, if given; only checked
    num_out_tokens  R, an int, a SymInt or a 0-dim CPU tensor; None, 0 and less mean T*K. Slots past it (the
                    highest experts) have no row; rows left over are zero
    num_negative_one_in_indices  ignored: such ids are found without it

    Differentiable in input_act: the fp32 sum over a token's rows, rounded once. No host sync.
    The map goes with `unpermute`. `cuda_token_permute` is the same function.
    """
    routing = _route(_name("permute"), input_act, indices, num_topK, num_out_tokens)
    return permute_rows(input_act, routing), conventions.to_row_id_map(routing)


def unpermute(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """Sum the rows of each token, weighted: input_act [R,H] -> [T,H], dtype of input_act.

    input_act   [R,H] fp16, bf16, fp32 or fp64, any strides
    row_id_map  [K*T] int32 from `permute`, map B
    probs       [T,K] fp32 (any float dtype); None takes K as 1

    Without probs each slot is a token of its own, as for the peer, since the map does not tell K: the result
    is [K*T,H], for K = 1 the rows in token order, for K > 1 the row of each slot in the order of the map.
    The plain sum over K > 1: probs of ones.
    Differentiable in input_act and probs. No host sync. An int64 map (map A, of `cuda_token_permute_torch`)
    is an ArgumentError. Peer: reads it as int32. `cuda_token_unpermute` is the same function.
    """
    name = _name("unpermute")
    _check_map(name, row_id_map, torch.int32, TORCH_PAIR)
    return combine(name, input_act, row_id_map, probs, None, TORCH_PAIR)


cuda_token_permute = permute
cuda_token_unpermute = unpermute


def cuda_token_permute_torch(
    input_act: Tensor,
    indices: Tensor,
    num_topK: int | None = None,
    num_out_tokens: int | Tensor | None = None,
    num_negative_one_in_indices: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `permute` with map A: (permuted [R,H], row_id_map [R] int64, the slot of each row).

    input_act       [T,H] any dtype and strides
    indices         [T,K] expert ids, any integer dtype, or [T] for K = 1; a negative id has no row
    num_topK        K, if given; only checked
    num_out_tokens  R, as for `permute`
    num_negative_one_in_indices  ignored: such ids are found without it

    The rows are those of `permute`. Rows without a slot are -1 in the map. Differentiable in input_act.
    The map goes with `cuda_token_unpermute_torch`. Peer: takes the default of the last three alone.
    """
    name = _name("cuda_token_permute_torch")
    routing = _route(name, input_act, indices, num_topK, num_out_tokens)
    return permute_rows(input_act, routing), conventions.to_sorted_slots(routing)


def cuda_token_unpermute_torch(
    input_act: Tensor, row_id_map: Tensor, probs: Tensor | None = None
) -> Tensor:
    """As `unpermute` with map A: input_act [R,H] -> [T,H], dtype of input_act.

    input_act   [R,H] fp16, bf16, fp32 or fp64, any strides
    row_id_map  [R] int64 from `cuda_token_permute_torch`, map A
    probs       [T,K] fp32 (any float dtype); None takes K as 1 and T as R

    Without probs each slot is a token of its own, as for the peer: the result is [R,H], the row of each slot
    in the order t*K + k, if none was dropped. The plain sum over K > 1: probs of ones.
    Differentiable in input_act and probs. No host sync. An int32 map (map B, of `permute`) is an
    ArgumentError.
    """
    name = _name("cuda_token_unpermute_torch")
    _check_map(name, row_id_map, torch.int64, CUDA_PAIR)
    check.tensor(name, "input_act", input_act, ["R", "H"], dtypes=check.FLOAT_DTYPES)
    num_rows = input_act.shape[0]
    if row_id_map.dim() != 1 or row_id_map.shape[0] != num_rows:
        expected = f"one entry for each of {num_rows} rows ({CUDA_PAIR})"
        check.fail(name, "row_id_map", expected, check.describe(row_id_map))
    check.tensor(name, "row_id_map", row_id_map, device=input_act.device)
    num_tokens, top_k = num_rows, 1
    if probs is not None:
        check.tensor(name, "probs", probs, ["T", "K"], dtypes=check.FLOAT_DTYPES)
        num_tokens, top_k = probs.shape
        check.at_least(name, "probs.shape[1]", top_k, 1)
    what = f"slots of `probs`, without them of input_act ({CUDA_PAIR})"
    check_entries(name, row_id_map, num_tokens * top_k, what)
    offsets = all_rows(num_rows, row_id_map)
    routing = conventions.from_sorted_slots(row_id_map, offsets, top_k, num_tokens)
    return unpermute_rows(input_act, routing, probs)


def group_gemm(x: Tensor, weights: Tensor, split_sizes: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: x [R,K] -> [R,N].

    x            [R,K] fp16, bf16, fp32 or fp64, any strides
    weights      [E,N,K], dtype and device of x
    split_sizes  [E] rows of each expert, any integer dtype, on the CPU or the device of x

    Rows past the last expert are zero. Differentiable in x and weights; an empty expert's gradient is zero.
    Sizes on the CPU are checked, those on a GPU are not. Peer: bf16 and fp16, sizes that sum to R.
    """
    name = _name("group_gemm")
    return multiply(name, ("x", "weights", "split_sizes"), x, weights, split_sizes, True)


def m_grouped_gemm(A: Tensor, B: Tensor, size_per_group: Tensor, trans_b: bool = False) -> Tensor:
    """Multiply each group's rows by its matrix: A [R,K] -> [R,N].

    A               [R,K] fp16, bf16, fp32 or fp64, any strides
    B               [E,K,N], with trans_b [E,N,K]; dtype and device of A
    size_per_group  [E] rows of each group, any integer dtype, on the CPU or the device of A
    trans_b         whether B is [E,N,K]

    As `group_gemm`, and differentiable in A and B. Peer: no gradient; reads any operand as contiguous.
    """
    name = _name("m_grouped_gemm")
    return multiply(name, ("A", "B", "size_per_group"), A, B, size_per_group, trans_b)


def k_grouped_gemm(A: Tensor, B: Tensor, size_per_group: Tensor) -> Tensor:
    """The product over each group's rows, A_e^T B_e: [E,M,N]; the weight gradient of a grouped GEMM.

    A               [R,M] fp16, bf16, fp32 or fp64, any strides
    B               [R,N] dtype and device of A, any strides
    size_per_group  [E] rows of each group, any integer dtype, on the CPU or the device of A

    d_weights of `group_gemm` is k_grouped_gemm(d_out, x, split_sizes). An empty group gives zeros; rows
    past the last group are not read. Differentiable in A and B.
    Peer: bf16 and fp16, no gradient; reads any operand as contiguous.
    """
    name = _name("k_grouped_gemm")
    check.tensor(name, "A", A, ["R", "M"], dtypes=check.FLOAT_DTYPES)
    check.tensor(name, "B", B, [A.shape[0], "N"], device=A.device)
    dtype = autocast_dtype(A)
    if dtype is not None:
        A, B = A.to(dtype), B.to(dtype)
    check.same_dtype(name, "B", B, "A", A.dtype)
    offsets = offsets_of(name, "size_per_group", size_per_group, A)
    result: Tensor = _Product.apply(A, B, offsets)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    """C[e] = A_e^T B_e: the weight gradient that the grouped GEMM has, with gradients of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, offsets)
        shape = (offsets.shape[0] - 1, a.shape[1], b.shape[1])
        weight = a.new_empty(()).expand(shape)  # only its shape and dtype matter
        product: Tensor = torch.ops.tokenyard.grouped_gemm_backward(
            b, a, weight, offsets, offsets.diff(), "EKN", False, True, False
        )[1]
        return product

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, offsets = ctx.saved_tensors
        d_a = grouped_gemm(b, d_product, offsets, layout="ENK")
        d_b = grouped_gemm(a, d_product, offsets, layout="EKN")
        return d_a, d_b, None


def _route(
    function: str,
    input_act: Tensor,
    indices: Tensor,
    num_topK: int | None,
    num_out_tokens: int | Tensor | None,
) -> Routing:
    routing = route_indices(function, input_act, indices, num_out_tokens)
    if num_topK is not None and num_topK != routing.top_k:
        check.fail(function, "num_topK", f"{routing.top_k}, the K of `indices`", num_topK)
    return routing


def _check_map(function: str, row_id_map: Tensor, dtype: torch.dtype, other_pair: str) -> None:
    check.tensor(function, "row_id_map", row_id_map)
    if row_id_map.dtype != dtype:
        expected = f"a {str(dtype).removeprefix('torch.')} map ({other_pair})"
        check.fail(function, "row_id_map", expected, check.describe(row_id_map))
