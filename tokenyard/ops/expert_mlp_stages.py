"""`expert_mlp` as kernels: nothing is read on the host, x and the pre-activation z alone are kept.

forward    up with the activation, down, weighted sum
backward   down transposed; the activation's gradient, which also gives w a and <d_a, a>; gradients of both
           weights; up transposed; sum
The rows of x are gathered as they are multiplied, or put side by side before. A low-rank addition is two
narrow GEMMs and a sum after the wide one, and the activation then a pass of its own.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard import backend
from tokenyard.ops.expert_mlp_parts import (
    PLAIN_SUM,
    Encoded,
    Form,
    Inputs,
    Maps,
    Projection,
)
from tokenyard.ops.rows import accumulation_dtype


class Stages(NamedTuple):
    """The kernels that the MLP is made of."""

    expert_mlp: ModuleType
    grouped_gemm: ModuleType
    permute: ModuleType
    unpermute: ModuleType
    activation: ModuleType


def stages_of(x: Tensor) -> Stages | None:
    """All of them, or None."""
    modules = [backend.kernels(name, x) for name in Stages._fields]
    return None if None in modules else Stages(*modules)  # type: ignore[arg-type]


def forward_in_stages(
    stages: Stages, inputs: Inputs, maps: Maps, form: Form, reduction: Encoded, keep: bool
) -> tuple[Tensor, Tensor]:
    """(out, z); z is empty unless it is to be kept."""
    a, z = _up(stages, inputs, maps, form, keep)
    y = _project(stages, a, form.down(inputs), maps)
    num_experts = maps.tokens_per_expert.shape[0]
    weights = inputs.topk_weights if form.weights_on == "output" else None
    sums = weights, maps.row_of_slot, maps.topk_indices, num_experts
    return stages.unpermute.combine(y, *sums, *reduction), z


def _project(stages: Stages, rows: Tensor, projection: Projection, maps: Maps) -> Tensor:
    multiply = stages.grouped_gemm.grouped_gemm
    weight, bias, a, b, scale, layout = projection
    out: Tensor = multiply(rows, weight, bias, *maps.groups, layout)
    if a is not None:
        low = multiply(rows, a, None, *maps.groups, "ENK")
        out.add_(multiply(low, b, None, *maps.groups, "ENK"), alpha=scale)
    return out


def _low(stages: Stages, d_out: Tensor, projection: Projection, maps: Maps) -> Tensor | None:
    """b^T d_out [R,r], where there is a low-rank addition."""
    if projection.b is None:
        return None
    low: Tensor = stages.grouped_gemm.grouped_gemm(d_out, projection.b, None, *maps.groups, "EKN")
    return low


def _project_back(
    stages: Stages, d_out: Tensor, projection: Projection, maps: Maps, low: Tensor | None
) -> Tensor:
    """The gradient of the rows."""
    multiply = stages.grouped_gemm.grouped_gemm
    weight, _, a, _, scale, layout = projection
    transposed = "EKN" if layout == "ENK" else "ENK"
    d_rows: Tensor = multiply(d_out, weight, None, *maps.groups, transposed)
    if low is not None:
        d_rows.add_(multiply(low, a, None, *maps.groups, "EKN"), alpha=scale)
    return d_rows


def _rows_of(stages: Stages, inputs: Inputs, maps: Maps, form: Form) -> Tensor:
    """The rows of x side by side, weighted where the weights are on the input."""
    rows: Tensor = stages.permute.permute(inputs.x, maps.row_of_slot, maps.slot_of_row)
    if form.weights_on == "input":
        weights = inputs.topk_weights.flatten().to(accumulation_dtype(rows.dtype))
        rows.mul_(stages.permute.gather_values(weights, maps.slot_of_row)[:, None])
    return rows


def _up(
    stages: Stages, inputs: Inputs, maps: Maps, form: Form, keep: bool
) -> tuple[Tensor, Tensor]:
    """(a, z or nothing)."""
    x, projection, kinds = inputs.x, form.gate_up(inputs), form[:2]
    if projection.a is not None:
        z = _project(stages, _rows_of(stages, inputs, maps, form), projection, maps)
        a: Tensor = stages.activation.activation(z, *kinds)
        return a, z if keep else z.new_empty(0)
    slots: Tensor | None = maps.slot_of_row
    gathers = form.weights_on != "input"
    if not (gathers and stages.expert_mlp.gathers(x, maps.num_rows, inputs.w_gate_up)):
        x, slots = _rows_of(stages, inputs, maps, form), None
    weights = inputs.w_gate_up, inputs.b_gate_up, *maps.groups, form.weight_layout == "ENK"
    up: tuple[Tensor, Tensor]
    up = stages.expert_mlp.up(x, slots, maps.top_k, *weights, *kinds, maps.num_rows, keep)
    return up


def backward_in_stages(
    stages: Stages,
    grad: Tensor,
    inputs: Inputs,
    kept: Tensor,
    maps: Maps,
    form: Form,
    need: list[bool],
) -> list[Tensor]:
    """The needed gradients of the inputs; empty for each other."""
    experts, gemm, permute, unpermute, _ = stages
    needs = dict(zip(Inputs._fields, need))
    x, on_input = inputs.x, form.weights_on == "input"
    rows_and_slots = maps.row_of_slot, maps.slot_of_row
    grads: dict[str, Tensor] = {}

    def differentiate(
        which: str, projection: Projection, d_out: Tensor, rows: Tensor, low: Tensor | None
    ) -> None:
        """Of a weight, and of the factors of its addition; `low` is b^T d_out."""
        _, _, a, _, scale, layout = projection
        if needs[f"w_{which}"]:
            weight = getattr(inputs, f"w_{which}")
            grads[f"w_{which}"] = _weight_gradient(stages, d_out, rows, weight, layout, maps)
        if needs[f"lora_a_{which}"] and a is not None and low is not None:
            d_a = _weight_gradient(stages, low, rows, a, "ENK", maps)
            grads[f"lora_a_{which}"] = d_a.mul_(scale)
        if needs[f"lora_b_{which}"]:
            b = getattr(inputs, f"lora_b_{which}")
            reduced = gemm.grouped_gemm(rows, a, None, *maps.groups, "ENK")
            d_b = _weight_gradient(stages, d_out, reduced, b, "ENK", maps)
            grads[f"lora_b_{which}"] = d_b.mul_(scale)

    z = kept
    if kept.numel() == 0:
        _, z = _up(stages, inputs, maps, form, True)
    d_y = permute.permute(grad, *rows_and_slots)  # before the weights
    down, gate_up = form.down(inputs), form.gate_up(inputs)
    low = _low(stages, d_y, down, maps)
    weighted = _project_back(stages, d_y, down, maps, low)  # d_a at first
    topk_weights = torch.ones_like(inputs.topk_weights) if on_input else inputs.topk_weights
    operands = weighted, z, topk_weights, maps.slot_of_row
    d_z, dots = experts.activation_gradient(*operands, *form[:2])
    differentiate("down", down, d_y, weighted, low)
    del weighted
    if needs["b_down"]:
        weight_of_row = permute.gather_values(topk_weights.flatten(), maps.slot_of_row)
        grads["b_down"] = gemm.bias_gradient(d_y, *maps.groups, weight_of_row)
    if needs["topk_weights"] and not on_input:
        grads["topk_weights"] = experts.weights_gradient(
            dots, maps.row_of_slot, grad, inputs.b_down, maps.topk_indices, topk_weights.dtype
        )
    del d_y
    low = _low(stages, d_z, gate_up, maps)
    if needs["b_gate_up"]:
        grads["b_gate_up"] = gemm.bias_gradient(d_z, *maps.groups)
    if on_input and (needs["x"] or needs["topk_weights"]):
        d_rows = _project_back(stages, d_z, gate_up, maps, low)
        # w x[t] of every row, and <d_row, x[t]>: what `unpermute` does for its gradient
        rows, grads["topk_weights"] = unpermute.unpermute_backward(
            x, d_rows, inputs.topk_weights, *rows_and_slots
        )
        differentiate("gate_up", gate_up, d_z, rows, low)
        sums = inputs.topk_weights, maps.row_of_slot, None, 1
        grads["x"] = unpermute.combine(d_rows, *sums, *PLAIN_SUM)
    else:
        if any(needs[f"{name}_gate_up"] for name in ("w", "lora_a", "lora_b")):
            rows = _rows_of(stages, inputs, maps, form)
            differentiate("gate_up", gate_up, d_z, rows, low)
            del rows
        if needs["x"]:
            d_rows = _project_back(stages, d_z, gate_up, maps, low)
            grads["x"] = unpermute.sum_rows(d_rows, maps.row_of_slot)
    empty = x.new_empty(0)
    return [grads[name] if needs[name] else empty for name in Inputs._fields]


def _weight_gradient(
    stages: Stages, d_out: Tensor, rows: Tensor, weight: Tensor, layout: str, maps: Maps
) -> Tensor:
    d_weight = weight.new_empty(weight.shape)
    operands = (d_out, rows) if layout == "ENK" else (rows, d_out)
    stages.grouped_gemm.weight_gradient(*operands, *maps.groups, d_weight, False)
    return d_weight
