"""One GEMM per expert, on the rows of that expert.

out[r]     = W[e] rows[r] (+ bias[e])      for the valid rows r of expert e; zero in padding rows
d_rows[r]  = W[e]^T d_out[r]               zero in padding rows
d_W[e]     = sum over the rows of e of d_out[r] rows[r]^T     exact zeros for an empty expert
d_bias[e]  = sum over the rows of e of d_out[r]

Products are accumulated in fp32 (fp64 for fp64) by the device's GEMM, rounded once.
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from tokenyard import backend, check
from tokenyard.ops.rows import accumulation_dtype, autocast_dtype, check_routing, multiply
from tokenyard.registration import Operator
from tokenyard.routing import Routing

LAYOUTS = ("ENK", "EKN")

WeightLayout = Literal["ENK", "EKN"]


def valid_rows(expert_offsets: Tensor, tokens_per_expert: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its valid rows) of every expert that has any; reads the counts on the host."""
    starts = expert_offsets.tolist()
    for expert, count in enumerate(tokens_per_expert.tolist()):
        if count > 0:
            yield expert, slice(starts[expert], starts[expert] + count)


def _definition(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    layout: str,
) -> Tensor:
    size = weight.shape[1 if layout == "ENK" else 2]
    pieces, done = [], 0
    for expert, valid in valid_rows(expert_offsets, tokens_per_expert):
        product = _product(rows[valid], weight, bias, expert, layout)
        pieces += [rows.new_zeros(valid.start - done, size), product]
        done = valid.stop
    if not pieces:  # an empty product keeps the graph
        pieces = [_product(rows[:0], weight, bias, 0, layout)]
    return torch.cat([*pieces, rows.new_zeros(rows.shape[0] - done, size)])


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, expert: int, layout: str) -> Tensor:
    matrix = weight[expert] if layout == "ENK" else weight[expert].t()
    return multiply(rows, matrix, None if bias is None else bias[expert])


def grouped_gemm_reference(
    rows: Tensor,
    weight: Tensor,
    groups: Routing | Tensor,
    *,
    layout: WeightLayout,
    bias: Tensor | None = None,
) -> Tensor:
    """The definition of `grouped_gemm`."""
    return _definition(rows, weight, bias, *_offsets_and_counts(groups), layout)


def _offsets_and_counts(groups: Routing | Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(groups, Routing):
        return groups.expert_offsets, groups.tokens_per_expert
    return groups, groups.diff()


@functools.wraps(_definition)
def _forward(rows: Tensor, *args: Any) -> Tensor:
    kernels = backend.kernels("grouped_gemm", rows)
    return (_definition if kernels is None else kernels.grouped_gemm)(rows, *args)


def _fake(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    layout: str,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1 if layout == "ENK" else 2])


def _backward(
    d_out: Tensor,
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    layout: str,
    need_rows: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor for each other."""
    kernels = backend.kernels("grouped_gemm", rows)
    if kernels is not None:
        return kernels.grouped_gemm_backward(
            d_out,
            rows,
            weight,
            expert_offsets,
            tokens_per_expert,
            layout,
            need_rows,
            need_weight,
            need_bias,
        )
    num_experts, size = weight.shape[0], d_out.shape[1]
    d_rows = rows.new_zeros(rows.shape) if need_rows else rows.new_empty(0)
    d_weight = weight.new_zeros(weight.shape) if need_weight else weight.new_empty(0)
    d_bias = weight.new_zeros(num_experts, size) if need_bias else weight.new_empty(0)
    for expert, valid in valid_rows(expert_offsets, tokens_per_expert):
        grad = d_out[valid]
        if need_rows:
            matrix = weight[expert] if layout == "ENK" else weight[expert].t()
            torch.mm(grad, matrix, out=d_rows[valid])
        if need_weight and layout == "ENK":
            torch.mm(grad.t(), rows[valid], out=d_weight[expert])
        elif need_weight:
            torch.mm(rows[valid].t(), grad, out=d_weight[expert])
        if need_bias:
            d_bias[expert] = grad.sum(0, dtype=accumulation_dtype(grad.dtype))
    return d_rows, d_weight, d_bias


def _backward_fake(
    d_out: Tensor,
    rows: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    layout: str,
    need_rows: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rows.new_empty(rows.shape) if need_rows else rows.new_empty(0),
        weight.new_empty(weight.shape) if need_weight else weight.new_empty(0),
        weight.new_empty(weight.shape[0], d_out.shape[1]) if need_bias else weight.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, _, expert_offsets, tokens_per_expert, ctx.layout = inputs
    ctx.save_for_backward(rows, weight, expert_offsets, tokens_per_expert)


def _gradient(ctx: Any, backward: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:3]
    grads = backward(d_out, *ctx.saved_tensors, ctx.layout, *needed)
    return *(grad if need else None for grad, need in zip(grads, needed)), None, None, None


_grouped_gemm = Operator(
    "grouped_gemm",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_backward_fake,
)


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    groups: Routing | Tensor,
    *,
    layout: WeightLayout,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply each expert's rows by its matrix: rows [R,K] -> [R,N].

    weight   [E,N,K] with layout "ENK" (as nn.Linear), or [E,K,N] with layout "EKN"
    groups   a Routing, whose padding rows are never read and come out zero; or expert_offsets [E+1]
             int32 or int64 on the device of rows, rows of expert e being offsets[e] : offsets[e+1]
             (rows past offsets[E] come out zero; the values are not checked on a GPU)
    bias     [E,N], or None

    bf16, fp16, fp32 or fp64, one dtype throughout; under autocast all follow the autocast dtype.
    Differentiable in rows, weight and bias; saves rows and weight. Raises ArgumentError.
    """
    check.tensor("grouped_gemm", "rows", rows, ["R", "K"], dtypes=check.FLOAT_DTYPES)
    check.tensor("grouped_gemm", "weight", weight)
    dtype = autocast_dtype(rows)
    if dtype is not None:
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    check.choice("grouped_gemm", "layout", layout, LAYOUTS)
    num_experts = _check_groups("grouped_gemm", groups, rows)
    check_weight(
        "grouped_gemm", "weight", weight, "rows", rows, num_experts, layout, rows.shape[1], "N"
    )
    size = weight.shape[1 if layout == "ENK" else 2]
    if bias is not None:
        check.tensor("grouped_gemm", "bias", bias, [num_experts, size], device=rows.device)
        check.same_dtype("grouped_gemm", "bias", bias, "rows", rows.dtype)
    return _grouped_gemm(rows, weight, bias, *_offsets_and_counts(groups), layout)


@torch.library.custom_op("tokenyard::grouped_gemm_add_weight_gradient", mutates_args=("out",))
def _add_weight_gradient(
    a: Tensor, b: Tensor, expert_offsets: Tensor, tokens_per_expert: Tensor, out: Tensor
) -> None:
    """out[e] += sum over the rows r of e of a[r] b[r]^T."""
    kernels = backend.kernels("grouped_gemm_add_weight_gradient", a)
    if kernels is not None and out.is_contiguous():
        kernels.weight_gradient(a, b, expert_offsets, tokens_per_expert, out, True)
        return
    acc = accumulation_dtype(a.dtype)
    for expert, valid in valid_rows(expert_offsets, tokens_per_expert):
        product = a[valid].to(acc).t() @ b[valid].to(acc)
        out[expert] = (out[expert].to(acc) + product).to(out.dtype)


def grouped_gemm_add_weight_gradient(
    d_out: Tensor,
    rows: Tensor,
    groups: Routing | Tensor,
    out: Tensor,
    *,
    layout: WeightLayout,
) -> Tensor:
    """Add the weight gradient of `grouped_gemm` to `out` in place, as to Megatron's `main_grad`.

    d_out [R,N], rows [R,K], groups, layout  as in `grouped_gemm`
    out                                      [E,N,K] or [E,K,N] by the layout; any float dtype

    The products are summed in fp32 (fp64 for fp64), `out` is added last, and the sum is rounded once.
    Experts without rows are left as they are. Returns `out`. Not differentiable. Raises ArgumentError.
    """
    name = "grouped_gemm_add_weight_gradient"
    check.tensor(name, "rows", rows, ["R", "K"], dtypes=check.FLOAT_DTYPES)
    check.tensor(name, "d_out", d_out, [rows.shape[0], "N"], device=rows.device)
    check.same_dtype(name, "d_out", d_out, "rows", rows.dtype)
    check.choice(name, "layout", layout, LAYOUTS)
    num_experts = _check_groups(name, groups, rows)
    a, b = (d_out, rows) if layout == "ENK" else (rows, d_out)
    shape = [num_experts, a.shape[1], b.shape[1]]
    check.tensor(name, "out", out, shape, dtypes=check.FLOAT_DTYPES, device=rows.device)
    offsets, counts = _offsets_and_counts(groups)
    _add_weight_gradient(a.detach(), b.detach(), offsets, counts, out)
    return out


def _check_groups(operator: str, groups: Routing | Tensor, rows: Tensor) -> int:
    """E, or an error."""
    if isinstance(groups, Routing):
        check_routing(operator, groups, rows.device)
        if groups.num_rows != rows.shape[0]:
            expected = f"{groups.num_rows} rows, those of the routing"
            check.fail(operator, "rows", expected, rows.shape[0])
        return groups.num_experts
    dtypes = frozenset({torch.int32, torch.int64})
    check.tensor(operator, "groups", groups, ["E+1"], dtypes=dtypes, device=rows.device)
    check.at_least(operator, "groups.shape[0]", groups.shape[0], 2)
    _check_offsets(operator, groups, rows.shape[0])
    return groups.shape[0] - 1


def check_weight(
    operator: str,
    argument: str,
    weight: Tensor,
    rows_argument: str,
    rows: Tensor,
    num_experts: int,
    layout: str,
    size_in: int | str,
    size_out: int | str,
) -> None:
    sizes = [size_out, size_in] if layout == "ENK" else [size_in, size_out]
    check.tensor(operator, argument, weight, [num_experts, *sizes], device=rows.device)
    check.same_dtype(operator, argument, weight, rows_argument, rows.dtype)


def _check_offsets(operator: str, expert_offsets: Tensor, num_rows: int) -> None:
    """Check the values where they can be read at no cost."""
    if torch.compiler.is_compiling() or not expert_offsets.is_cpu:
        return
    if type(expert_offsets) is not Tensor:
        return
    offsets = expert_offsets.tolist()
    if offsets[0] != 0 or offsets[-1] > num_rows or sorted(offsets) != offsets:
        expected = f"offsets that start at 0, never decrease and end at {num_rows} at most"
        check.fail(operator, "groups", expected, offsets)
