"""Drop-in for `grouped_gemm.ops`: the GEMM per expert, and the permutation by expert ids.

T tokens, H hidden size, E experts, K experts per token, R rows of the permuted buffer. Rows are grouped
by expert, ascending, and in token order within an expert.

row_id_map  [K*T] int32: the row of slot (t,k) at k*T + t, -1 for a slot without a row

As the peer, but defined where it is not:
- CPU tensors, fp64, any strides, any H
- sums in fp32 (fp64 for fp64 rows), k ascending, rounded once. Peer: adds up in the dtype of the rows
- under autocast `gmm` computes in its dtype
- an id of -1 has no row, adds nothing, and its probability has gradient zero
- rows that no slot or no expert owns are zero; no tokens, nothing routed and empty experts give results of
  the documented shapes, with gradients. Peer: returns its argument and no map, asserts, or leaves the
  memory unwritten
Nothing waits for a GPU, but GEMMs without a kernel (fp64, or no Triton).
The peer's `sinkhorn_kernel` and `backend` are not here.

>>> import torch
>>> ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
>>> x = torch.arange(5.0)[:, None]
>>> rows, row_id_map = permute(x, ids)
>>> rows.flatten().tolist(), row_id_map.tolist()
([0.0, 1.0, 3.0, 0.0, 2.0, 3.0, 4.0, 1.0, 2.0, 4.0], [3, 7, 8, 2, 6, 0, 1, 4, 5, 9])
>>> unpermute(rows, row_id_map, torch.full((5, 2), 0.5)).flatten().tolist()
[0.0, 1.0, 2.0, 3.0, 4.0]
"""

import warnings

import torch
from torch import Tensor

from tokenyard import check, conventions
from tokenyard.compat.te_maps import read_index_map, route_ids
from tokenyard.ops.grouped_gemm import grouped_gemm
from tokenyard.ops.permute import permute as permute_rows
from tokenyard.ops.rows import autocast_dtype
from tokenyard.ops.unpermute import unpermute as unpermute_rows
from tokenyard.routing import Routing

__all__ = ["gmm", "permute", "unpermute"]

ARGSORT_PAIR = (
    "an int64 argsort, such as that of cuda_token_permute_torch, names slots: it goes with "
    "tokenyard.compat.xtuner.cuda_token_unpermute_torch"
)


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Multiply each expert's rows by its matrix: a [R,K] -> [R,N].

    a            [R,K] fp16, bf16, fp32 or fp64, any strides
    b            [E,K,N], with trans_b [E,N,K]; dtype and device of a
    batch_sizes  [E] rows of each expert, any integer dtype, on the CPU or the device of a
    trans_b      whether b is [E,N,K]

    Rows past the last expert are zero. Differentiable in a and b; an empty expert's gradient is zero.
    Sizes on the CPU are checked, those on a GPU are not.
    Peer: bf16 only; batch_sizes int64 on the CPU and not all zero.
    """
    name = "compat.grouped_gemm.gmm"
    return multiply(name, ("a", "b", "batch_sizes"), a, b, batch_sizes, trans_b)


def permute(
    input_act: Tensor,
    indices: Tensor,
    num_out_tokens: int | Tensor | None = None,
    max_token_num: int = 0,
) -> tuple[Tensor, Tensor]:
    """Copy every token to the rows of its experts: (permuted [R,H], row_id_map [K*T] int32).

    input_act       [T,H] any dtype and strides
    indices         [T,K] expert ids, any integer dtype, or [T] for K = 1; a negative id has no row
    num_out_tokens  R, an int, a SymInt or a 0-dim CPU tensor; None, 0 and less mean T*K. Slots past it (the
                    highest experts) have no row; rows left over are zero
    max_token_num   ignored: there is no workspace

    Differentiable in input_act: the fp32 sum over a token's rows, rounded once. No host sync.
    Peer: gives rows to ids of -1, before all others; leaves rows past T*K unwritten.
    """
    routing = route_indices("compat.grouped_gemm.permute", input_act, indices, num_out_tokens)
    return permute_rows(input_act, routing), conventions.to_row_id_map(routing)


def unpermute(
    input_act: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None = None,
    max_tokens: int | None = None,
    num_topK: int | None = None,
) -> Tensor:
    """Sum the rows of each token, weighted: input_act [R,H] -> [T,H], dtype of input_act.

    input_act   [R,H] fp16, bf16, fp32 or fp64, any strides
    row_id_map  [K*T] int32 from `permute`; int64 with a warning, as the peer
    probs       [T,K] fp32 (any float dtype), or None for the plain sum
    max_tokens  T or more; T itself if neither probs nor num_topK tells K
    num_topK    K, where there are no probs

    With the map alone K is 1, as for the peer: the result is [K*T,H], the row of each slot in the order of
    the map.
    Differentiable in input_act and probs. No host sync. Entries outside the rows add nothing; on the CPU they
    are an ArgumentError. Not detectable: an argsort (row -> slot) of the same length, cast to int32.
    Peer: no num_topK, so that only probs make sums; ignores probs for K = 1; reads past its rows.
    """
    name = "compat.grouped_gemm.unpermute"
    if isinstance(row_id_map, Tensor) and row_id_map.dtype == torch.int64:
        warnings.warn(f"tokenyard.{name}: `row_id_map` is int64; {ARGSORT_PAIR}", stacklevel=2)
    elif isinstance(row_id_map, Tensor) and row_id_map.dtype != torch.int32:
        check.fail(name, "row_id_map", "an int32 map", check.describe(row_id_map))
    top_k = num_topK or None
    if top_k is None and probs is None and max_tokens:
        check.tensor(name, "row_id_map", row_id_map, ["K*T"])
        num_slots = row_id_map.shape[0]
        check.multiple_of(name, "len(row_id_map)", num_slots, max_tokens, "max_tokens")
        top_k = max(num_slots // max_tokens, 1)
    out = combine(name, input_act, row_id_map, probs, top_k, ARGSORT_PAIR)
    if max_tokens:
        check.at_least(name, "max_tokens", max_tokens, out.shape[0])
    return out


def multiply(
    function: str,
    arguments: tuple[str, str, str],
    rows: Tensor,
    weight: Tensor,
    sizes: Tensor,
    trans_b: bool,
) -> Tensor:
    """[R,K] rows times [E,K,N], or [E,N,K] with trans_b; `arguments` names the three for messages."""
    check.tensor(function, arguments[0], rows, ["R", "K"], dtypes=check.FLOAT_DTYPES)
    offsets = offsets_of(function, arguments[2], sizes, rows)
    num_experts, size = sizes.shape[0], rows.shape[1]
    shape: list[int | str] = [num_experts, size, "N"]
    if trans_b:
        shape = [num_experts, "N", size]
    check.tensor(function, arguments[1], weight, shape, device=rows.device)
    if autocast_dtype(rows) is None:
        check.same_dtype(function, arguments[1], weight, arguments[0], rows.dtype)
    return grouped_gemm(rows, weight, offsets, layout="ENK" if trans_b else "EKN")


def offsets_of(function: str, argument: str, sizes: Tensor, rows: Tensor) -> Tensor:
    """[E+1] on the device of rows; sizes [E] are checked where they can be read at no cost."""
    check.tensor(function, argument, sizes, ["E"], dtypes=check.INTEGER_DTYPES)
    check.at_least(function, f"{argument}.shape[0]", sizes.shape[0], 1)
    if sizes.device != rows.device and not sizes.is_cpu:
        check.fail(function, argument, f"device cpu or {rows.device}", check.describe(sizes))
    if readable(sizes):
        counts = sizes.tolist()
        if min(counts) < 0 or sum(counts) > rows.shape[0]:
            check.fail(function, argument, f"sizes of {rows.shape[0]} rows at most", counts)
    return conventions.from_group_counts(sizes, device=rows.device)


def route_indices(
    function: str, input_act: Tensor, indices: Tensor, num_out_tokens: int | Tensor | None
) -> Routing:
    """The routing of ids [T,K] or [T], after the checks that both drop-ins make."""
    check.tensor(function, "indices", indices, dtypes=check.INTEGER_DTYPES)
    ids = indices[:, None] if indices.dim() == 1 else indices
    if ids.dim() != 2 or ids.shape[1] < 1:
        check.fail(function, "indices", "shape [T, K] or [T]", check.describe(indices))
    check.tensor(function, "input_act", input_act, [ids.shape[0], "H"], device=ids.device)
    if isinstance(num_out_tokens, Tensor):
        cpu, dtypes = torch.device("cpu"), check.INTEGER_DTYPES
        check.tensor(function, "num_out_tokens", num_out_tokens, [], dtypes=dtypes, device=cpu)
    return route_ids(ids, num_out_tokens)


def combine(
    function: str,
    input_act: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    top_k: int | None,
    other_pair: str,
) -> Tensor:
    """The sum by a map [K*T], slot -> row; K is that of probs, else `top_k`, else 1."""
    check.tensor(function, "input_act", input_act, ["R", "H"], dtypes=check.FLOAT_DTYPES)
    check.tensor(function, "row_id_map", row_id_map, ["K*T"], device=input_act.device)
    num_rows, num_slots = input_act.shape[0], row_id_map.shape[0]
    if top_k is not None:
        check.at_least(function, "num_topK", top_k, 1)
    if probs is not None:
        shape: list[int | str] = ["T", "K" if top_k is None else top_k]
        check.tensor(function, "probs", probs, shape, dtypes=check.FLOAT_DTYPES)
        top_k = probs.shape[1]
        if probs.numel() != num_slots or top_k < 1:
            expected = f"one entry for each of {list(probs.shape)} `probs` ({other_pair})"
            check.fail(function, "row_id_map", expected, check.describe(row_id_map))
    top_k = 1 if top_k is None else top_k
    check.multiple_of(function, "len(row_id_map)", num_slots, top_k, "num_topK")
    check_entries(function, row_id_map, num_rows, f"rows of input_act ({other_pair})")
    return unpermute_rows(input_act, read_index_map(row_id_map, num_rows, top_k), probs)


def check_entries(function: str, row_id_map: Tensor, bound: int, what: str) -> None:
    """Refuse entries outside -1 .. bound - 1, where they can be read at no cost."""
    if row_id_map.numel() == 0 or not readable(row_id_map):
        return
    least, most = (int(entry) for entry in torch.aminmax(row_id_map))
    if least < -1 or most >= bound:
        expected = f"entries from -1 to {bound - 1}, {what}"
        check.fail(function, "row_id_map", expected, f"entries from {least} to {most}")


def readable(tensor: Tensor) -> bool:
    """Whether its values can be read at no cost: a plain CPU tensor, outside a traced program."""
    return not torch.compiler.is_compiling() and tensor.is_cpu and type(tensor) is Tensor
