"""The router's linear layer, in fp32 whatever the dtype of the model.

logits[t,e]  = sum over h of x[t,h] weight[e,h] (+ bias[e])
d_x[t,h]     = sum over e of d[t,e] weight[e,h]          d is the gradient of the logits
d_weight[e,h] = sum over t of d[t,e] x[t,h],     d_bias[e] = sum over t of d[t,e]

Accumulated in fp32 (fp64 for an fp64 x) by the device's GEMM, in its order; gradients are rounded
once, to the dtypes of x, weight and bias. Without tokens the gradients are zero.

A product of two bf16 or two fp16 numbers is exact in fp32. So a CUDA GPU multiplies such an x and
weight as they are, into fp32 logits, instead of an fp32 copy of each. For the gradients of bf16, d is
split into hi = bf16(d) and lo = bf16(d - hi), which hold it to 2^-17, and d W = hi W + lo W is one
bf16 GEMM over 2E. fp16 has not the range for that: its gradients take fp32 GEMMs.

PyTorch's `allow_bf16_reduced_precision_reduction` concerns d_x of bf16 alone, where a GEMM that splits 2E
may round its parts; under `allow_fp16_accumulation`, fp16 takes the fp32 GEMM.
fp32 GEMMs (fp32, fp16 gradients, mixed dtypes) follow the TF32 setting, as every fp32 GEMM does.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenyard import check
from tokenyard.ops.rows import accumulation_dtype
from tokenyard.registration import Operator


def router_logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition of `router_logits`."""
    acc = accumulation_dtype(x.dtype)
    return F.linear(x.to(acc), weight.to(acc), None if bias is None else bias.to(acc))


@functools.cache
def _has_16_bit_gemm(device: torch.device) -> bool:
    """Whether torch multiplies bf16 into fp32 there: not on ROCm, nor before sm_80."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _multiplies_as_they_are(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cuda or x.dtype != weight.dtype:
        return False
    if x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return False  # torch refuses an fp32 output then
    return x.dtype in (torch.bfloat16, torch.float16) and _has_16_bit_gemm(x.device)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """16-bit matrices into fp32; torch has it on GPUs alone."""
    return torch.mm(a, b, out_dtype=torch.float32)


def _halves(d: Tensor) -> Tensor:
    """d [T,E] fp32 -> [T,2E] bf16: d rounded, and what the rounding left."""
    size = d.shape[1]
    out = d.new_empty(d.shape[0], 2 * size, dtype=torch.bfloat16)
    hi, lo = out[:, :size], out[:, size:]
    hi.copy_(d)
    torch.sub(d, hi, out=lo)  # in fp32, where it is exact, and rounded at the store
    return out


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _multiplies_as_they_are(x, weight):
        return router_logits_reference(x, weight, bias)
    logits = _multiply(x, weight.t())
    return logits if bias is None else logits.add_(bias.float())


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=accumulation_dtype(x.dtype))


def _backward(
    d_logits: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed, d_bias in the dtype of the logits; an empty tensor for each other."""
    d_x, d_weight = x.new_empty(0), weight.new_empty(0)
    d_bias = d_logits.sum(0) if need_bias else d_logits.new_empty(0)
    if x.dtype == torch.bfloat16 and _multiplies_as_they_are(x, weight):
        halves = _halves(d_logits) if need_x or need_weight else d_logits
        if need_x:
            d_x = halves @ torch.cat([weight, weight])
        if need_weight:
            hi, lo = _multiply(halves.t(), x).chunk(2)
            d_weight = (hi + lo).to(weight.dtype)
        return d_x, d_weight, d_bias
    acc = d_logits.dtype
    if need_x:
        d_x = (d_logits @ weight.to(acc)).to(x.dtype)
    if need_weight:
        d_weight = (d_logits.t() @ x.to(acc)).to(weight.dtype)
    return d_x, d_weight, d_bias


def _backward_fake(
    d_logits: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if need_x else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
        d_logits.new_empty(d_logits.shape[1] if need_bias else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, backward: Any, d_logits: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    d_x, d_weight, d_bias = backward(d_logits, *ctx.saved_tensors, *needed)
    return (
        d_x if needed[0] else None,
        d_weight if needed[1] else None,
        d_bias.to(ctx.bias_dtype) if needed[2] else None,
    )


_router_logits = Operator(
    "router_logits",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_backward_fake,
)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply tokens by the router's matrix: x [T,H] -> logits [T,E], fp32 (fp64 for an fp64 x).

    weight   [E,H]
    bias     [E], or None

    bf16, fp16, fp32 or fp64, each of a dtype of its own; the same under autocast as without it.
    Differentiable in x, weight and bias, with gradients in their dtypes; saves x and weight as they
    are, no copy in fp32. Raises ArgumentError.

    >>> router_logits(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    name, dtypes = "router_logits", check.FLOAT_DTYPES
    check.tensor(name, "x", x, ["T", "H"], dtypes=dtypes)
    check.tensor(name, "weight", weight, ["E", x.shape[1]], dtypes=dtypes, device=x.device)
    if bias is not None:
        check.tensor(name, "bias", bias, [weight.shape[0]], dtypes=dtypes, device=x.device)
    return _router_logits(x, weight, bias)
