"""The whole expert MLP, from the tokens to their weighted sum, as one differentiable operator.

row r of expert e holds token t, with routing weight w:
z[r]   = W1[e] x[t] + b1[e]
a[r]   = activation(z[r])
y[r]   = W2[e] a[r] + b2[e]
out[t] = sum over the token's rows of w * y[r], as `unpermute` does

Only x and z are kept for the backward (x alone with `recompute`), as in SonicMoE (Guo et al., 2025):
d_a[r] = W2[e]^T g[t]                d_w   = <d_a[r], a[r]> + <g[t], b2[e]>
d_z[r] = activation'(z[r]) w d_a[r]  d_W2[e] = sum of g[t] (w a[r])^T,  d_b2[e] = sum of w g[t]
d_x[t] = sum of W1[e]^T d_z[r]       d_W1[e] = sum of d_z[r] x[t]^T,    d_b1[e] = sum of d_z[r]
Each of z, a, y, d_a, d_z, w a is rounded to the dtype of x.
"""

from typing import Any

import torch
from torch import Tensor

from tokenyard import check
from tokenyard.ops.activation import (
    UNGATED,
    Activation,
    GateUpLayout,
    activation_backward_reference,
    activation_reference,
    activation_size,
    check_activation,
)
from tokenyard.ops.expert_mlp_stages import backward_in_stages, forward_in_stages, stages_of
from tokenyard.ops.grouped_gemm import (
    LAYOUTS,
    WeightLayout,
    check_weight,
    grouped_gemm_reference,
    valid_rows,
)
from tokenyard.ops.permute import permute_reference
from tokenyard.ops.rows import (
    accumulation_dtype,
    autocast_dtype,
    check_routing,
    check_topk_weights,
    gather_rows,
    sum_rows,
)
from tokenyard.ops.unpermute import (
    Reduction,
    check_reduction,
    combine_reference,
    encode_reduction,
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
    reduction: Reduction = "slot",
) -> Tensor:
    """The definition of `expert_mlp`, differentiated by autograd."""
    rows = permute_reference(x, routing)
    z = grouped_gemm_reference(rows, w_gate_up, routing, layout=weight_layout, bias=b_gate_up)
    a = activation_reference(z, activation, gate_up_layout)
    y = grouped_gemm_reference(a, w_down, routing, layout=weight_layout, bias=b_down)
    return unpermute_reference(y, routing, topk_weights, reduction=reduction)


def _matrix(weight: Tensor, expert: int, layout: str) -> Tensor:
    """[N,K] the matrix of an expert, whichever way it is stored."""
    return weight[expert] if layout == "ENK" else weight[expert].t()


def _linear(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(rows, matrix, bias)


def _forward(
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(out, z); z is empty unless it is to be kept. Expert by expert, so that a, y and x's rows
    stay in the cache."""
    stages = stages_of(x)
    if stages is not None:
        return forward_in_stages(
            stages,
            x,
            topk_weights,
            w_gate_up,
            w_down,
            b_gate_up,
            b_down,
            topk_indices,
            row_of_slot,
            slot_of_row,
            expert_offsets,
            tokens_per_expert,
            activation,
            gate_up_layout,
            weight_layout,
            order,
            ep_size,
            within_rank,
            across_ranks,
            keep,
        )
    num_rows, hidden_size = slot_of_row.shape[0], x.shape[1]
    kept = _kept(x, w_gate_up, slot_of_row, weight_layout, keep).zero_()
    y = x.new_empty(num_rows, hidden_size)
    token_of_row = slot_of_row // row_of_slot.shape[1]
    for expert, valid in valid_rows(expert_offsets, tokens_per_expert):
        rows = x.index_select(0, token_of_row[valid])
        z = _linear(
            rows,
            _matrix(w_gate_up, expert, weight_layout),
            None if b_gate_up is None else b_gate_up[expert],
        )
        if keep:
            kept[valid] = z
        a = activation_reference(z, activation, gate_up_layout)  # type: ignore[arg-type]
        y[valid] = _linear(
            a, _matrix(w_down, expert, weight_layout), None if b_down is None else b_down[expert]
        )
    out = combine_reference(
        y,
        topk_weights,
        row_of_slot,
        topk_indices,
        expert_offsets.shape[0] - 1,
        order,
        ep_size,
        within_rank,
        across_ranks,
    )
    return out, kept


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
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _kept(x, w_gate_up, slot_of_row, weight_layout, keep)


def _backward(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    kept: Tensor,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    need: list[bool],
) -> list[Tensor]:
    """The needed gradients of the first six arguments of the forward; empty for each other."""
    stages = stages_of(x)
    if stages is not None:
        return backward_in_stages(
            stages,
            grad,
            x,
            topk_weights,
            w_gate_up,
            w_down,
            b_gate_up,
            b_down,
            kept,
            topk_indices,
            row_of_slot,
            slot_of_row,
            expert_offsets,
            tokens_per_expert,
            activation,
            gate_up_layout,
            weight_layout,
            need,
        )
    need_x, need_weights, need_w1, need_w2, need_b1, need_b2 = need
    acc = accumulation_dtype(x.dtype)
    num_rows = slot_of_row.shape[0]
    d_w1, d_w2, d_b1, d_b2 = (
        x.new_zeros(value.shape) if needed and value is not None else x.new_empty(0)
        for value, needed in zip((w_gate_up, w_down, b_gate_up, b_down), need[2:])
    )
    d_rows = x.new_empty(num_rows, x.shape[1]) if need_x else x.new_empty(0)
    d_weight_of_row = x.new_zeros(num_rows, dtype=acc)
    weight_of_row = gather_rows(topk_weights.flatten(), slot_of_row).to(acc)
    token_of_row = slot_of_row // row_of_slot.shape[1]

    for expert, valid in valid_rows(expert_offsets, tokens_per_expert):
        w1 = _matrix(w_gate_up, expert, weight_layout)
        w2 = _matrix(w_down, expert, weight_layout)
        rows = x.index_select(0, token_of_row[valid])
        g = grad.index_select(0, token_of_row[valid])
        weight = weight_of_row[valid, None]
        if kept.numel() == 0:
            z = _linear(rows, w1, None if b_gate_up is None else b_gate_up[expert])
        else:
            z = kept[valid]
        d_a = (g @ w2).to(acc)
        d_z, a = activation_backward_reference(
            d_a * weight,
            z,
            activation,  # type: ignore[arg-type]
            gate_up_layout,  # type: ignore[arg-type]
        )
        if need_weights:
            d_weight_of_row[valid] = (d_a * a).sum(1)
            if b_down is not None:
                d_weight_of_row[valid] += g.to(acc) @ b_down[expert].to(acc)
        if need_w2:
            d_w2_e = _matrix(d_w2, expert, weight_layout)
            d_w2_e.copy_(g.t() @ (a * weight).to(x.dtype))
        if need_b2:
            d_b2[expert] = weight[:, 0] @ g.to(acc)
        if need_w1:
            _matrix(d_w1, expert, weight_layout).copy_(d_z.t() @ rows)
        if need_b1:
            d_b1[expert] = d_z.sum(0, dtype=acc)
        if need_x:
            torch.mm(d_z, w1, out=d_rows[valid])

    d_x = sum_rows(d_rows, row_of_slot).to(x.dtype) if need_x else d_rows
    d_weights = x.new_empty(0)
    if need_weights:
        d_weights = gather_rows(d_weight_of_row, row_of_slot.flatten()).view(row_of_slot.shape)
        d_weights = d_weights.to(topk_weights.dtype)
    return [d_x, d_weights, d_w1, d_w2, d_b1, d_b2]


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    kept: Tensor,
    topk_indices: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    activation: str,
    gate_up_layout: str,
    weight_layout: str,
    need: list[bool],
) -> list[Tensor]:
    inputs = (x, topk_weights, w_gate_up, w_down, b_gate_up, b_down)
    return [
        torch.empty_like(value, memory_format=torch.contiguous_format)
        if needed and value is not None
        else x.new_empty(0)
        for value, needed in zip(inputs, need)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    maps, ctx.options = inputs[6:11], tuple(inputs[11:14])
    kept = output[1]
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], kept, *maps)


def _gradient(ctx: Any, backward: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 19
    need = list(ctx.needs_input_grad[:6])
    grads = backward(grad, *ctx.saved_tensors, *ctx.options, need)
    return *(value if needed else None for value, needed in zip(grads, need)), *[None] * 13


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
    reduction: Reduction = "slot",
    recompute: bool = False,
) -> Tensor:
    """Run every token through its experts: x [T,H] -> [T,H].

    topk_weights   [T,K] routing weights, any floating-point dtype, never cast
    w_gate_up      [E,2I,H] ([E,I,H] for ungated activations), w_down [E,H,I]; with weight_layout
                   "EKN" [E,H,2I] and [E,I,H]
    b_gate_up      [E,2I] ([E,I]), b_down [E,H], or None
    activation     see `activation`; gate_up_layout "concatenated" or "interleaved"
    reduction      the order of the final sum, see `unpermute`
    recompute      save x alone and compute the pre-activation again in the backward

    bf16, fp16, fp32 or fp64; x, weights and biases share one dtype, under autocast that of autocast.
    Differentiable in x, topk_weights, weights and biases; saves x and the pre-activation [R,2I], or
    with `recompute` x alone, besides its arguments. Raises ArgumentError.
    """
    check.tensor("expert_mlp", "x", x)
    for argument, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        check.tensor("expert_mlp", argument, weight)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, w_gate_up, w_down = x.to(dtype), w_gate_up.to(dtype), w_down.to(dtype)
        b_gate_up = None if b_gate_up is None else b_gate_up.to(dtype)
        b_down = None if b_down is None else b_down.to(dtype)
    name = "expert_mlp"
    check_routing(name, routing, x.device)
    check.tensor(name, "x", x, [routing.num_tokens, "H"], dtypes=check.FLOAT_DTYPES)
    check_topk_weights(name, topk_weights, routing)
    check_activation(name, "activation", activation, "gate_up_layout", gate_up_layout)
    check.choice(name, "weight_layout", weight_layout, LAYOUTS)
    check_reduction(name, reduction, routing, "x", x, weighted=True)
    num_experts, hidden_size = routing.num_experts, x.shape[1]
    check_weight(
        name, "w_gate_up", w_gate_up, "x", x, num_experts, weight_layout, hidden_size, "2I"
    )
    gate_up_size = w_gate_up.shape[1 if weight_layout == "ENK" else 2]
    if activation not in UNGATED:
        check.multiple_of(name, "w_gate_up", gate_up_size, 2, "columns of gate and up")
    size = activation_size(gate_up_size, activation)
    check_weight(name, "w_down", w_down, "x", x, num_experts, weight_layout, size, hidden_size)
    for argument, bias, width in (
        ("b_gate_up", b_gate_up, gate_up_size),
        ("b_down", b_down, hidden_size),
    ):
        if bias is not None:
            check.tensor(name, argument, bias, [num_experts, width], device=x.device)
            check.same_dtype(name, argument, bias, "x", x.dtype)
    inputs = (x, topk_weights, w_gate_up, w_down, b_gate_up, b_down)
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
        *encode_reduction(reduction),
        differentiated and not recompute,
    )
    return out
