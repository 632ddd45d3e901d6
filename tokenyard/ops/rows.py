"""The two moves that the permutation family is made of, adjoint to one another.

gather_rows   out[i] = x[index[i]], zero where index[i] is -1
sum_rows      out[t] = sum over k of x[index[t,k]] (* weights[t,k]), k = 0, 1, ..., skipping -1
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from tokenyard import check
from tokenyard.routing import Routing

_BITS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_CACHED = 1 << 17
"""Elements that are worked on at a time."""
_TURNED = frozenset([*range(1, 6), *range(16, 65)])
"""Rows for which `multiply` turns a product round."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for every other floating-point dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_moved(operator: str, argument: str, value: Tensor) -> None:
    """Every dtype moves but the complex ones, which neither the sums of gradients nor the kernels know."""
    if value.is_complex():
        check.fail(operator, argument, "a real dtype", check.describe(value))


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [N,...] any dtype, index [M] int -> [M,...]; bit-exact."""
    bits = _BITS.get(x.dtype)  # few operators know these dtypes
    if bits is not None:
        return gather_rows(x.view(bits), index).view(x.dtype)
    if x.shape[0] == 0:
        # nothing to gather from: every index is -1; cat keeps the graph
        return torch.cat([x, x.new_zeros(index.shape[0], *x.shape[1:])])
    out = x.index_select(0, index.clamp(min=0))
    absent = index < 0
    if absent.is_cpu and not absent.any():
        return out
    return out.masked_fill_(absent.view(-1, *[1] * (x.dim() - 1)), 0)


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """x [N,D], index [T,K] int, weights [T,K] or None -> [T,D] in the accumulation dtype.

    A chain from zero: out = out + c_k, c_k = acc(x[index[t,k]]) * acc(weights[t,k]) rounded on its own.
    """
    dtype = accumulation_dtype(x.dtype)
    (num_tokens, top_k), size = index.shape, x.shape[1]
    out = x.new_zeros(num_tokens, size, dtype=dtype)
    # of as many tokens at a time as leaves their terms in the cache
    step = max(_CACHED // max(top_k * size, 1), 1)
    for start in range(0, max(num_tokens, 1), step):  # no tokens keep the graph
        some = slice(start, start + step)
        total = out[some]
        weight = None if weights is None else weights[some].flatten()
        terms = term(x, index[some].flatten(), weight, dtype).view(len(total), top_k, size)
        for k in range(top_k):
            total += terms[:, k]
    return out


def term(x: Tensor, index: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x[index] (* weights), [T,D] in `dtype`; exactly zero where there is no row, whatever the weight."""
    rows = gather_rows(x, index).to(dtype)
    if weights is None:
        return rows
    return rows * weights.to(dtype).masked_fill(index < 0, 0)[:, None]


def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [N,K], matrix [M,K] -> rows @ matrix.T (+ bias) [N,M].

    On a CPU, `_TURNED` numbers of fp32 rows are the second factor of its product rather than the first, and
    one row goes twice: 1.1 to 4 times as fast by the BLAS of PyTorch, with weights that come from memory.
    """
    turned = rows.shape[0] in _TURNED and rows.is_cpu and rows.dtype == torch.float32
    if not (turned and matrix.stride(1) == 1):
        return linear(rows, matrix, bias)
    if rows.shape[0] == 1:
        out = (matrix @ torch.cat([rows, rows]).t()).t()[:1]
    else:
        out = (matrix @ rows.t()).t()
    return out if bias is None else out.add_(bias)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on the tensor's device; None for none, and for fp64."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or device == "meta":  # autocast does not know meta
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_routing(operator: str, routing: object, device: torch.device) -> None:
    if not isinstance(routing, Routing):
        check.fail(operator, "routing", "a tokenyard.Routing", check.describe(routing))
    if routing.device != device:
        check.fail(operator, "routing", f"device {device}", f"device {routing.device}")


def check_topk_weights(operator: str, topk_weights: Tensor, routing: Routing) -> None:
    check.tensor(
        operator,
        "topk_weights",
        topk_weights,
        [routing.num_tokens, routing.top_k],
        dtypes=check.FLOAT_DTYPES,
        device=routing.device,
    )
