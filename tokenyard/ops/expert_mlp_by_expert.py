"""`expert_mlp` one expert after another, so that what lies between its GEMMs stays in the cache."""

import torch
from torch import Tensor

from tokenyard.ops.activation import activation_backward_reference, activation_reference
from tokenyard.ops.expert_mlp_parts import Encoded, Form, Inputs, Maps, Projection
from tokenyard.ops.grouped_gemm import valid_rows
from tokenyard.ops.rows import accumulation_dtype, gather_rows, multiply, sum_rows
from tokenyard.ops.unpermute import combine_reference


def _matrix(weight: Tensor, expert: int, layout: str) -> Tensor:
    """[N,K] the matrix of an expert, whichever way it is stored."""
    return weight[expert] if layout == "ENK" else weight[expert].t()


def _project(rows: Tensor, projection: Projection, expert: int) -> Tensor:
    weight, bias, a, b, scale, layout = projection
    out = multiply(rows, _matrix(weight, expert, layout), None if bias is None else bias[expert])
    if a is not None and b is not None:
        out.add_(multiply(multiply(rows, a[expert]), b[expert]), alpha=scale)
    return out


def _project_back(d_out: Tensor, projection: Projection, expert: int) -> Tensor:
    """The gradient of the rows."""
    weight, _, a, b, scale, layout = projection
    d_rows = d_out @ _matrix(weight, expert, layout)
    if a is not None and b is not None:
        d_rows.add_((d_out @ b[expert]) @ a[expert], alpha=scale)
    return d_rows


def _differentiate(
    d_out: Tensor,
    rows: Tensor,
    projection: Projection,
    expert: int,
    d_weight: Tensor | None,
    d_a: Tensor | None,
    d_b: Tensor | None,
) -> None:
    """Write the gradients that there is a place for."""
    _, _, a, b, scale, layout = projection
    if d_weight is not None:
        _matrix(d_weight, expert, layout).copy_(d_out.t() @ rows)
    if d_a is not None and b is not None:
        d_a[expert] = ((d_out @ b[expert]).t() @ rows).mul_(scale)
    if d_b is not None and a is not None:
        d_b[expert] = (d_out.t() @ multiply(rows, a[expert])).mul_(scale)


def _weighted(rows: Tensor, weight: Tensor) -> Tensor:
    """weight [N,1] in the accumulation dtype; rounded once."""
    return (rows.to(weight.dtype) * weight).to(rows.dtype)


def _weight_of_row(inputs: Inputs, maps: Maps) -> Tensor:
    """[R,1], the routing weight of every row in the accumulation dtype."""
    weights = gather_rows(inputs.topk_weights.flatten(), maps.slot_of_row)
    return weights.to(accumulation_dtype(inputs.x.dtype))[:, None]


def forward_by_expert(
    inputs: Inputs, maps: Maps, form: Form, reduction: Encoded, kept: Tensor, keep: bool
) -> Tensor:
    """out; z goes to `kept` if it is to be kept."""
    x, on_input = inputs.x, form.weights_on == "input"
    gate_up, down = form.gate_up(inputs), form.down(inputs)
    y = x.new_empty(maps.num_rows, x.shape[1])
    token_of_row = maps.slot_of_row // maps.top_k
    weight_of_row = _weight_of_row(inputs, maps) if on_input else None
    for expert, valid in valid_rows(*maps.groups):
        rows = x.index_select(0, token_of_row[valid])
        if weight_of_row is not None:
            rows = _weighted(rows, weight_of_row[valid])
        z = _project(rows, gate_up, expert)
        if keep:
            kept[valid] = z
        a = activation_reference(z, form.activation, form.gate_up_layout)  # type: ignore[arg-type]
        y[valid] = _project(a, down, expert)
    num_experts = maps.tokens_per_expert.shape[0]
    weights = inputs.topk_weights if form.weights_on == "output" else None
    return combine_reference(
        y, weights, maps.row_of_slot, maps.topk_indices, num_experts, *reduction
    )


def backward_by_expert(
    grad: Tensor, inputs: Inputs, kept: Tensor, maps: Maps, form: Form, need: list[bool]
) -> list[Tensor]:
    """The needed gradients of the inputs; empty for each other."""
    x, on_input = inputs.x, form.weights_on == "input"
    need_x, need_weights = need[:2]
    gate_up, down = form.gate_up(inputs), form.down(inputs)
    acc = accumulation_dtype(x.dtype)
    places = [
        value.new_zeros(value.shape) if needed and value is not None else None
        for value, needed in zip(inputs, need)
    ]
    d = Inputs(*places)  # type: ignore[arg-type]
    need_rows = need_x or (on_input and need_weights)
    d_rows = x.new_empty(maps.num_rows, x.shape[1]) if need_rows else None
    d_weight_of_row = x.new_zeros(maps.num_rows, dtype=acc)
    token_of_row, weight_of_row = maps.slot_of_row // maps.top_k, _weight_of_row(inputs, maps)

    for expert, valid in valid_rows(*maps.groups):
        tokens = x.index_select(0, token_of_row[valid])
        g = grad.index_select(0, token_of_row[valid])
        weight = weight_of_row[valid]
        rows = _weighted(tokens, weight) if on_input else tokens
        z = kept[valid] if kept.numel() else _project(rows, gate_up, expert)
        d_a = _project_back(g, down, expert).to(acc)
        after = torch.ones_like(weight) if on_input else weight
        d_z, a = activation_backward_reference(
            d_a * after,
            z,
            form.activation,  # type: ignore[arg-type]
            form.gate_up_layout,  # type: ignore[arg-type]
        )
        _differentiate(g, _weighted(a, after), down, expert, d.w_down, d.lora_a_down, d.lora_b_down)
        _differentiate(d_z, rows, gate_up, expert, d.w_gate_up, d.lora_a_gate_up, d.lora_b_gate_up)
        if d.b_down is not None:
            d.b_down[expert] = after[:, 0] @ g.to(acc)
        if d.b_gate_up is not None:
            d.b_gate_up[expert] = d_z.sum(0, dtype=acc)
        if d_rows is not None:
            d_rows[valid] = _project_back(d_z, gate_up, expert)
        if need_weights and not on_input:
            d_weight_of_row[valid] = (d_a * a).sum(1)
            if inputs.b_down is not None:
                d_weight_of_row[valid] += g.to(acc) @ inputs.b_down[expert].to(acc)
        elif need_weights and d_rows is not None:
            d_weight_of_row[valid] = (d_rows[valid].to(acc) * tokens.to(acc)).sum(1)

    grads = [x.new_empty(0) if place is None else place for place in places]
    if need_x and d_rows is not None:
        weights = inputs.topk_weights if on_input else None
        grads[0] = sum_rows(d_rows, maps.row_of_slot, weights).to(x.dtype)
    if need_weights:
        of_slot = gather_rows(d_weight_of_row, maps.row_of_slot.flatten())
        grads[1] = of_slot.view(maps.row_of_slot.shape).to(inputs.topk_weights.dtype)
    return grads
