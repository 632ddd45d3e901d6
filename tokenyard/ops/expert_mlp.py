"""The whole expert MLP, from the tokens to their weighted sum, as one differentiable operator.

row r of expert e holds token t, with routing weight w:
z[r]   = W1[e] x[t] + b1[e]
a[r]   = activation(z[r])
y[r]   = W2[e] a[r] + b2[e]
out[t] = sum over the token's rows of w * y[r], as `unpermute` does

or, with the weights on the input, z[r] = W1[e] (w x[t]) + b1[e] and out[t] = the sum of y[r]. With low-rank
additions W row stands for W row + scale * B (A row), and W^T d for W^T d + scale * A^T (B^T d).

Only x and z are kept for the backward (x alone with `recompute`), as in SonicMoE (Guo et al., 2025):
d_a[r] = W2[e]^T g[t]                d_w   = <d_a[r], a[r]> + <g[t], b2[e]>
d_z[r] = activation'(z[r]) w d_a[r]  d_W2[e] = sum of g[t] (w a[r])^T,  d_b2[e] = sum of w g[t]
d_x[t] = sum of W1[e]^T d_z[r]       d_W1[e] = sum of d_z[r] x[t]^T,    d_b1[e] = sum of d_z[r]
d_B[e] = scale * sum of d (A row)^T, d_A[e] = scale * sum of (B^T d) row^T, of a W's rows and d
With the weights on the input d_a, d_z, w a go without w; d_x[t] = sum of w d_row[r], d_w = <d_row[r], x[t]>.
Each of w x, z, a, y, d_a, d_z, w a is rounded to the dtype of x, and both terms of a low-rank addition are.
"""

from typing import Any

import torch
from torch import Tensor

from tokenyard import check
from tokenyard.ops.activation import (
    UNGATED,
    Activation,
    GateUpLayout,
    activation_reference,
    activation_size,
    check_activation,
)
from tokenyard.ops.expert_mlp_by_expert import backward_by_expert, forward_by_expert
from tokenyard.ops.expert_mlp_parts import (
    NUM_INPUTS,
    WEIGHTS_ON,
    Encoded,
    Form,
    Inputs,
    LoRA,
    Maps,
    WeightsOn,
)
from tokenyard.ops.expert_mlp_stages import backward_in_stages, forward_in_stages, stages_of
from tokenyard.ops.grouped_gemm import (
    LAYOUTS,
    WeightLayout,
    check_weight,
    grouped_gemm_reference,
)
from tokenyard.ops.permute import permute_reference
from tokenyard.ops.rows import (
    accumulation_dtype,
    autocast_dtype,
    check_routing,
    check_topk_weights,
    gather_rows,
)
from tokenyard.ops.unpermute import (
    Reduction,
    check_reduction,
    encode_reduction,
    sum_dtype,
    unpermute_reference,
)
from tokenyard.registration import Operator
from tokenyard.routing import Routing


def expert_mlp_reference(
    x: Tensor,
    routing: Routing,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: Activation = "swiglu",
    gate_up_layout: GateUpLayout = "concatenated",
    weight_layout: WeightLayout = "ENK",
    weights_on: WeightsOn = "output",
    lora_gate_up: LoRA | None = None,
    lora_down: LoRA | None = None,
    reduction: Reduction = "slot",
) -> Tensor:
    """The definition of `expert_mlp`, differentiated by autograd (not so with the weights on "later")."""

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRA | None) -> Tensor:
        out = grouped_gemm_reference(rows, weight, routing, layout=weight_layout, bias=bias)
        if lora is None:
            return out
        low = grouped_gemm_reference(rows, lora.a, routing, layout="ENK")
        return out.add(grouped_gemm_reference(low, lora.b, routing, layout="ENK"), alpha=lora.scale)

    rows = permute_reference(x, routing)
    weights = topk_weights if weights_on == "output" else None
    if weights_on == "input":
        acc = accumulation_dtype(x.dtype)
        weight_of_row = gather_rows(topk_weights.flatten(), routing.slot_of_row).to(acc)
        rows = (rows.to(acc) * weight_of_row[:, None]).to(x.dtype)
    z = project(rows, w_gate_up, b_gate_up, lora_gate_up)
    a = activation_reference(z, activation, gate_up_layout)
    y = project(a, w_down, b_down, lora_down)
    return unpermute_reference(y, routing, weights, reduction=reduction)


def _forward(
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    lora_a_gate_up: Tensor | None,
    lora_b_gate_up: Tensor | None,
    lora_a_down: Tensor | None,
    lora_b_down: Tensor | None,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    weights_on: str,
    scale_gate_up: float,
    scale_down: float,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(out, z); z is empty unless it is to be kept."""
    inputs = Inputs(
        x,
        topk_weights,
        w_gate_up,
        w_down,
        b_gate_up,
        b_down,
        lora_a_gate_up,
        lora_b_gate_up,
        lora_a_down,
        lora_b_down,
    )
    maps = Maps(topk_indices, row_of_slot, slot_of_row, expert_offsets, tokens_per_expert)
    form = Form(
        activation,
        gate_up_layout,
        weight_layout,
        weights_on,
        scale_gate_up,
        scale_down,
    )
    reduction = Encoded(order, ep_size, within_rank, across_ranks)
    stages = stages_of(x)
    if stages is not None:
        return forward_in_stages(stages, inputs, maps, form, reduction, keep)
    kept = _kept(x, w_gate_up, slot_of_row, weight_layout, keep).zero_()
    return forward_by_expert(inputs, maps, form, reduction, kept, keep), kept


def _kept(
    x: Tensor, w_gate_up: Tensor, slot_of_row: Tensor, weight_layout: str, keep: bool
) -> Tensor:
    if not keep:
        return x.new_empty(0)
    return x.new_empty(slot_of_row.shape[0], w_gate_up.shape[1 if weight_layout == "ENK" else 2])


def _fake(
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    lora_a_gate_up: Tensor | None,
    lora_b_gate_up: Tensor | None,
    lora_a_down: Tensor | None,
    lora_b_down: Tensor | None,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    weights_on: str,
    scale_gate_up: float,
    scale_down: float,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=sum_dtype(x.dtype, within_rank, across_ranks))
    return out, _kept(x, w_gate_up, slot_of_row, weight_layout, keep)


def _backward(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    lora_a_gate_up: Tensor | None,
    lora_b_gate_up: Tensor | None,
    lora_a_down: Tensor | None,
    lora_b_down: Tensor | None,
    kept: Tensor,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    weights_on: str,
    scale_gate_up: float,
    scale_down: float,
    need: list[bool],
) -> list[Tensor]:
    """The needed gradients of the inputs; empty for each other."""
    inputs = Inputs(
        x,
        topk_weights,
        w_gate_up,
        w_down,
        b_gate_up,
        b_down,
        lora_a_gate_up,
        lora_b_gate_up,
        lora_a_down,
        lora_b_down,
    )
    maps = Maps(topk_indices, row_of_slot, slot_of_row, expert_offsets, tokens_per_expert)
    form = Form(
        activation,
        gate_up_layout,
        weight_layout,
        weights_on,
        scale_gate_up,
        scale_down,
    )
    stages = stages_of(x)
    if stages is not None:
        return backward_in_stages(stages, grad, inputs, kept, maps, form, need)
    return backward_by_expert(grad, inputs, kept, maps, form, need)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    lora_a_gate_up: Tensor | None,
    lora_b_gate_up: Tensor | None,
    lora_a_down: Tensor | None,
    lora_b_down: Tensor | None,
    kept: Tensor,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    weights_on: str,
    scale_gate_up: float,
    scale_down: float,
    need: list[bool],
) -> list[Tensor]:
    inputs = (
        x,
        topk_weights,
        w_gate_up,
        w_down,
        b_gate_up,
        b_down,
        lora_a_gate_up,
        lora_b_gate_up,
        lora_a_down,
        lora_b_down,
    )
    return [
        torch.empty_like(value, memory_format=torch.contiguous_format)
        if needed and value is not None
        else x.new_empty(0)
        for value, needed in zip(inputs, need)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    maps = inputs[NUM_INPUTS : NUM_INPUTS + len(Maps._fields)]
    ctx.form = tuple(inputs[NUM_INPUTS + len(Maps._fields) :][: len(Form._fields)])
    kept = output[1]
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:NUM_INPUTS], kept, *maps)


def _gradient(ctx: Any, backward: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    others = [None] * (len(Maps._fields) + len(Form._fields) + len(Encoded._fields) + 1)
    if grad is None:
        return *[None] * NUM_INPUTS, *others
    need = list(ctx.needs_input_grad[:NUM_INPUTS])
    x, *saved = ctx.saved_tensors
    grads = backward(grad.to(x.dtype), x, *saved, *ctx.form, need)
    return *(value if needed else None for value, needed in zip(grads, need)), *others


_expert_mlp = Operator(
    "expert_mlp",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_backward_fake,
)


def expert_mlp(
    x: Tensor,
    routing: Routing,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: Activation = "swiglu",
    gate_up_layout: GateUpLayout = "concatenated",
    weight_layout: WeightLayout = "ENK",
    weights_on: WeightsOn = "output",
    lora_gate_up: LoRA | None = None,
    lora_down: LoRA | None = None,
    reduction: Reduction = "slot",
    recompute: bool = False,
) -> Tensor:
    """Run every token through its experts: x [T,H] -> [T,H].

    topk_weights   [T,K] routing weights, any floating-point dtype, never cast
    w_gate_up      [E,2I,H] ([E,I,H] for ungated activations), w_down [E,H,I]; with weight_layout
                   "EKN" [E,H,2I] and [E,I,H]
    b_gate_up      [E,2I] ([E,I]), b_down [E,H], or None
    activation     see `activation`; gate_up_layout "concatenated" or "interleaved"
    weights_on     "output": the experts' outputs are weighted; "input": their inputs are (Llama 4);
                   "later", for K = 1: out is not weighted, and its gradient is taken to be that of the
                   weighted out, as it is where `tokenyard.parallel` weighs on another rank
    lora_gate_up   a `LoRA` of rank r added to w_gate_up: a [E,r,H], b [E,2I,r] ([E,I,r]); lora_down:
                   a [E,r,I], b [E,H,r]; no sum of matrices is made
    reduction      the order of the final sum, see `unpermute`
    recompute      save x alone and compute the pre-activation again in the backward

    bf16, fp16, fp32 or fp64; x, weights, biases and factors share one dtype, under autocast that of autocast.
    Differentiable in x, topk_weights, weights, biases and factors; nothing is computed for those that need no
    gradient. Saves x and the pre-activation [R,2I], or with `recompute` x alone, besides its arguments.
    Raises ArgumentError.
    """
    name = "expert_mlp"
    check.tensor(name, "x", x)
    for argument, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        check.tensor(name, argument, weight)
    factors = [*_factors("lora_gate_up", lora_gate_up), *_factors("lora_down", lora_down)]
    scales = (lora.scale if lora is not None else 1.0 for lora in (lora_gate_up, lora_down))
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, w_gate_up, w_down = x.to(dtype), w_gate_up.to(dtype), w_down.to(dtype)
        b_gate_up = None if b_gate_up is None else b_gate_up.to(dtype)
        b_down = None if b_down is None else b_down.to(dtype)
        factors = [None if factor is None else factor.to(dtype) for factor in factors]
    check_routing(name, routing, x.device)
    check.tensor(name, "x", x, [routing.num_tokens, "H"], dtypes=check.FLOAT_DTYPES)
    check_topk_weights(name, topk_weights, routing)
    check_activation(name, "activation", activation, "gate_up_layout", gate_up_layout)
    check.choice(name, "weight_layout", weight_layout, LAYOUTS)
    check.choice(name, "weights_on", weights_on, WEIGHTS_ON)
    check_reduction(name, reduction, routing, "x", x, weighted=True)
    if weights_on != "output" and encode_reduction(reduction)[2] == "fma_bf16":
        check.fail(name, "weights_on", "'output', for within_rank 'fma_bf16'", repr(weights_on))
    if weights_on == "later" and routing.top_k != 1:
        check.fail(name, "weights_on", "'output' or 'input', for K > 1", repr(weights_on))
    num_experts, hidden_size = routing.num_experts, x.shape[1]
    check_weight(
        name, "w_gate_up", w_gate_up, "x", x, num_experts, weight_layout, hidden_size, "2I"
    )
    gate_up_size = w_gate_up.shape[1 if weight_layout == "ENK" else 2]
    if activation not in UNGATED:
        check.multiple_of(name, "w_gate_up", gate_up_size, 2, "columns of gate and up")
    size = activation_size(gate_up_size, activation)
    check_weight(name, "w_down", w_down, "x", x, num_experts, weight_layout, size, hidden_size)
    sizes = {"gate_up": (hidden_size, gate_up_size), "down": (size, hidden_size)}
    for (which, (size_in, size_out)), bias, a, b in zip(
        sizes.items(), (b_gate_up, b_down), factors[::2], factors[1::2]
    ):
        if bias is not None:
            check.tensor(name, f"b_{which}", bias, [num_experts, size_out], device=x.device)
            check.same_dtype(name, f"b_{which}", bias, "x", x.dtype)
        if a is not None and b is not None:
            lora = f"lora_{which}"
            check_weight(name, f"{lora}.a", a, "x", x, num_experts, "ENK", size_in, "r")
            check_weight(name, f"{lora}.b", b, "x", x, num_experts, "ENK", a.shape[1], size_out)
    inputs = (x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, *factors)
    differentiated = torch.is_grad_enabled() and any(
        value is not None and value.requires_grad for value in inputs
    )
    out, _ = _expert_mlp(
        *inputs,
        routing.topk_indices,
        routing.row_of_slot,
        routing.slot_of_row,
        routing.expert_offsets,
        routing.tokens_per_expert,
        activation,
        gate_up_layout,
        weight_layout,
        weights_on,
        *scales,
        *encode_reduction(reduction),
        differentiated and not recompute,
    )
    return out


def _factors(argument: str, lora: LoRA | None) -> tuple[Tensor | None, Tensor | None]:
    if lora is None:
        return None, None
    if not isinstance(lora, LoRA):
        check.fail("expert_mlp", argument, "a tokenyard.LoRA", check.describe(lora))
    for factor in ("a", "b"):
        check.tensor("expert_mlp", f"{argument}.{factor}", getattr(lora, factor))
    check.number("expert_mlp", f"{argument}.scale", lora.scale)
    return lora.a, lora.b
