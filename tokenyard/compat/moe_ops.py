"""Drop-in for moe_ops: routing, permutation, the GEMM per expert.

T tokens, H hidden size, E experts, K experts per token, R rows of the permuted buffer. Rows are grouped
by expert, ascending, and in token order within an expert.

row_id_map  [K*T] int32: the row of slot (t,k) at k*T + t, -1 for a slot without a row
offsets     [E+1] int32: rows of expert e are offsets[e] : offsets[e+1]

As the peer, but defined where it is not:
- rows of one expert are in token order, always. Peer: in the order in which its atomics arrive
- any E, CPU tensors, fp64, any strides. Peer: E a power of two, contiguous logits, maps and B
- sums in fp32 (fp64 for fp64 rows), k ascending, each product rounded on its own, the sum rounded once
- an id of -1 or E has no row, adds nothing, and its probability has gradient zero. Peer: writes out of bounds
- rows that no slot or no expert owns are zero. Peer: leaves the memory unwritten
- no tokens, nothing routed and empty experts give results of the documented shapes, with gradients
Nothing waits for a GPU, but `permute` without E and GEMMs without a kernel (fp64, or no Triton). Maps of the
peer are read as well as those made here.

>>> import torch
>>> ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
>>> x = torch.arange(5.0)[:, None]
>>> rows, row_id_map, offsets = permute(x, ids, E=3)
>>> rows.flatten().tolist(), row_id_map.tolist(), offsets.tolist()
([0.0, 1.0, 3.0, 0.0, 2.0, 3.0, 4.0, 1.0, 2.0, 4.0], [3, 7, 8, 2, 6, 0, 1, 4, 5, 9], [0, 3, 7, 10])
>>> rows = grouped_gemm(rows, torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1), offsets)
>>> unpermute(rows, row_id_map, torch.full((5, 2), 0.5), num_tokens=5, num_topK=2).flatten().tolist()
[0.0, 50.5, 110.0, 16.5, 220.0]
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard import check, conventions
from tokenyard.compat.grouped_gemm import check_entries
from tokenyard.compat.te_maps import read_index_map
from tokenyard.ops.grouped_gemm import grouped_gemm as multiply_groups
from tokenyard.ops.permute import permute as permute_rows
from tokenyard.ops.rows import autocast_dtype
from tokenyard.ops.topk import topk
from tokenyard.ops.unpermute import unpermute as unpermute_rows
from tokenyard.routing import Routing, route

__all__ = [
    "fused_topk_softmax",
    "grouped_gemm",
    "permute",
    "permute_backward",
    "supports_tma",
    "unpermute",
    "unpermute_backward",
    "unpermute_forward",
]


def _name(function: str) -> str:
    return f"compat.moe_ops.{function}"


def fused_topk_softmax(logits: Tensor, K: int, fp32_routing: bool = False) -> tuple[Tensor, Tensor]:
    """The K greatest logits, and the softmax over these K: (weights [T,K], indices [T,K] int32).

    logits        [T,E] fp16, bf16, fp32 or fp64, any strides
    K             1 to E
    fp32_routing  whether the weights are fp32; else they have the dtype of the logits

    Descending, ties to the lowest id. A NaN logit counts as -inf, and -inf has weight zero. Computed in fp32
    (fp64 for fp64) and rounded once. Differentiable in logits; saves logits and ids.
    Peer: the gradient comes from the rounded weights; where fewer than K logits are above -inf it names an
    expert twice, and where none is its weights are NaN.
    """
    name = _name("fused_topk_softmax")
    check.tensor(name, "logits", logits, ["T", "E"], dtypes=check.FLOAT_DTYPES)
    if not 1 <= K <= logits.shape[1]:
        check.fail(name, "K", f"1 to E = {logits.shape[1]}", K)
    dtype = torch.float32 if fp32_routing else logits.dtype
    return topk(logits, K, score="softmax_of_selected", dtype=dtype)


def permute(
    input: Tensor, indices: Tensor, num_out_tokens: int = 0, E: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy every token to the rows of its experts: (permuted [R,H], row_id_map [K*T], offsets [E+1]).

    input           [T,H] any dtype and strides
    indices         [T,K] expert ids, any integer dtype; -1 and E mean no expert
    num_out_tokens  R; -1, 0 and all below T*K mean T*K, so nothing is dropped. Rows left over are zero
    E               the experts; None and 0 take the greatest id plus one, which waits for the GPU and
                    cannot be compiled in one graph

    Differentiable in input: the fp32 sum over a token's rows, rounded once. Ids on the CPU are checked.
    Peer: E a power of two; rows past T*K are unwritten.
    """
    name = _name("permute")
    check.tensor(name, "indices", indices, ["T", "K"], dtypes=check.INTEGER_DTYPES)
    num_tokens, top_k = indices.shape
    check.tensor(name, "input", input, [num_tokens, "H"], device=indices.device)
    check.at_least(name, "num_out_tokens", num_out_tokens, -1)
    if E is None or E <= 0:
        E = max(int(indices.max()) + 1, 1) if indices.numel() > 0 else 1
    routing = route(indices, E, num_rows=torch.sym_max(num_out_tokens, num_tokens * top_k))
    return permute_rows(input, routing), *conventions.to_moe_ops_map(routing)


def permute_backward(
    grad_permuted: Tensor, row_id_map: Tensor, num_tokens: int, topK: int
) -> Tensor:
    """The gradient of `permute`, the plain sum of each token's rows: grad_permuted [R,H] -> [T,H].

    row_id_map        [K*T] from `permute`, or from the peer
    num_tokens, topK  T, K
    """
    name = _name("permute_backward")
    routing = _read_map(name, "grad_permuted", grad_permuted, row_id_map, num_tokens, topK)
    return unpermute_rows(grad_permuted, routing)


def unpermute(
    input: Tensor,
    row_id_map: Tensor,
    prob: Tensor,
    num_tokens: int,
    num_topK: int,
    max_tokens: int = -1,
) -> Tensor:
    """Sum the rows of each token, weighted: input [R,H] -> [T,H], dtype of input.

    input                 [R,H] fp16, bf16, fp32 or fp64, any strides
    row_id_map            [K*T] from `permute`, or from the peer
    prob                  [T,K] any float dtype
    num_tokens, num_topK  T, K
    max_tokens            rows of the result: the first tokens, or all and then zeros; -1 means T

    Differentiable in input and prob. `unpermute_forward` is the same function.
    Peer: lays the map out for max_tokens in the forward, for num_tokens in the backward; reads past both.
    """
    name = _name("unpermute")
    routing = _read_map(name, "input", input, row_id_map, num_tokens, num_topK)
    _check_prob(name, prob, routing)
    check.at_least(name, "max_tokens", max_tokens, -1)
    out = unpermute_rows(input, routing, prob)
    return out if max_tokens == -1 else pad(out, (0, 0, 0, max_tokens - num_tokens))


unpermute_forward = unpermute


def unpermute_backward(
    grad_out: Tensor,
    input_fwd: Tensor,
    row_id_map: Tensor,
    prob: Tensor,
    num_tokens: int,
    num_topK: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of `unpermute`: (of input [R,H], of prob [T,K]), each in the dtype of its own.

    grad_out              [T,H] dtype of input_fwd
    input_fwd             [R,H] the input of `unpermute`
    row_id_map            [K*T] from `permute`, or from the peer
    prob                  [T,K] any float dtype
    num_tokens, num_topK  T, K

    Rows that no slot owns get zero. Not differentiable. Peer: leaves those rows unwritten.
    """
    name = _name("unpermute_backward")
    routing = _read_map(name, "input_fwd", input_fwd, row_id_map, num_tokens, num_topK)
    _check_prob(name, prob, routing)
    shape = [num_tokens, input_fwd.shape[1]]
    check.tensor(name, "grad_out", grad_out, shape, device=input_fwd.device)
    check.same_dtype(name, "grad_out", grad_out, "input_fwd", input_fwd.dtype)
    with torch.no_grad():
        grads: tuple[Tensor, Tensor] = torch.ops.tokenyard.unpermute_backward(
            grad_out, input_fwd, prob, routing.row_of_slot, routing.slot_of_row
        )
    return grads


def grouped_gemm(A: Tensor, B: Tensor, offsets: Tensor, trans_b: bool = True) -> Tensor:
    """Multiply each expert's rows by its matrix: A [R,K] -> [R,N].

    A        [R,K] fp16, bf16, fp32 or fp64, any strides
    B        [E,N,K], without trans_b [E,K,N]; dtype and device of A, any strides
    offsets  [E+1] from `permute`, or the ends [E]; int32 or int64, on the device of A
    trans_b  whether B is [E,N,K]

    Rows past the last expert are zero. Differentiable in A and B; an empty expert's gradient is zero.
    Under autocast it computes in its dtype. Offsets on the CPU are checked, those on a GPU are not.
    Peer: given ends [E] it takes the rows of other experts for the gradient of B, without TMA for the product
    too; without trans_b B has no gradient.
    """
    name = _name("grouped_gemm")
    check.tensor(name, "A", A, ["R", "K"], dtypes=check.FLOAT_DTYPES)
    shape: list[int | str] = ["E", "N", A.shape[1]] if trans_b else ["E", A.shape[1], "N"]
    check.tensor(name, "B", B, shape, device=A.device)
    if autocast_dtype(A) is None:
        check.same_dtype(name, "B", B, "A", A.dtype)
    num_experts, dtypes = B.shape[0], frozenset({torch.int32, torch.int64})
    check.tensor(name, "offsets", offsets, ["E+1"], dtypes=dtypes, device=A.device)
    if offsets.shape[0] == num_experts:
        offsets = conventions.from_group_ends(offsets)
    elif offsets.shape[0] != num_experts + 1:
        expected = f"shape [{num_experts + 1}] or [{num_experts}]"
        check.fail(name, "offsets", expected, check.describe(offsets))
    return multiply_groups(A, B, offsets, layout="ENK" if trans_b else "EKN")


def supports_tma(dtype: torch.dtype | None = None) -> bool:
    """Whether the GPU has the TMA unit (NVIDIA Hopper and later), and `dtype` is None, fp16 or bf16.

    False without a GPU. Peer: fails without one.
    """
    if dtype not in (None, torch.float16, torch.bfloat16):
        return False
    nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability()[0] >= 9


def _read_map(
    function: str, argument: str, rows: Tensor, row_id_map: Tensor, num_tokens: int, top_k: int
) -> Routing:
    """The routing of a map whose rows are in any order within an expert."""
    check.tensor(function, argument, rows, ["R", "H"], dtypes=check.FLOAT_DTYPES)
    shape, dtypes = [num_tokens * top_k], check.INTEGER_DTYPES
    check.tensor(function, "row_id_map", row_id_map, shape, dtypes=dtypes, device=rows.device)
    check_entries(function, row_id_map, rows.shape[0], f"rows of {argument}")
    return read_index_map(row_id_map, rows.shape[0], top_k)


def _check_prob(function: str, prob: Tensor, routing: Routing) -> None:
    shape = [routing.num_tokens, routing.top_k]
    dtypes, device = check.FLOAT_DTYPES, routing.device
    check.tensor(function, "prob", prob, shape, dtypes=dtypes, device=device)
