"""`expert_mlp` as the kernels of its stages: nothing is read on the host, x and z alone are kept.

forward    permute x, up, activation, down, weighted sum
backward   permute the gradient, down transposed, activation (with w a and <d_a, a>), gradient of w_down,
           permute x again, gradient of w_gate_up, up transposed, sum
"""

from types import ModuleType

from torch import Tensor

from tokenyard import backend

NAMES = ("permute", "grouped_gemm", "activation", "unpermute")

Stages = tuple[ModuleType, ModuleType, ModuleType, ModuleType]


def stages_of(x: Tensor) -> Stages | None:
    """The kernels of the four operators that the stages are made of, or None without them."""
    if backend.kernels("expert_mlp", x) is None:
        return None
    permute, gemm, activation, unpermute = (backend.kernels(name, x) for name in NAMES)
    if permute is None or gemm is None or activation is None or unpermute is None:
        return None
    return permute, gemm, activation, unpermute


def forward_in_stages(
    stages: Stages,
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
    kind: str,
    gate_up_layout: str,
    weight_layout: str,
    *reduction: str | int,
) -> tuple[Tensor, Tensor]:
    """(out, z)."""
    permute, gemm, activation, unpermute = stages
    groups = expert_offsets, tokens_per_expert
    rows = permute.permute(x, row_of_slot, slot_of_row)
    z = gemm.grouped_gemm(rows, w_gate_up, b_gate_up, *groups, weight_layout)
    del rows
    a = activation.activation(z, kind, gate_up_layout)
    y = gemm.grouped_gemm(a, w_down, b_down, *groups, weight_layout)
    num_experts = tokens_per_expert.shape[0]
    out = unpermute.combine(y, topk_weights, row_of_slot, topk_indices, num_experts, *reduction)
    return out, z


def backward_in_stages(
    stages: Stages,
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    kept: Tensor,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    kind: str,
    gate_up_layout: str,
    weight_layout: str,
    need: list[bool],
) -> list[Tensor]:
    """The needed gradients; empty for each other."""
    permute, gemm, activation, unpermute = stages
    need_x, need_weights, need_w1, need_w2, need_b1, need_b2 = need
    groups = expert_offsets, tokens_per_expert
    maps = row_of_slot, slot_of_row
    transposed = "EKN" if weight_layout == "ENK" else "ENK"
    d_x = d_weights = d_w1 = d_w2 = d_b1 = d_b2 = x.new_empty(0)

    def weight_gradient(d_out: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        d_weight = weight.new_empty(weight.shape)
        operands = (d_out, rows) if weight_layout == "ENK" else (rows, d_out)
        gemm.weight_gradient(*operands, *groups, d_weight, False)
        return d_weight

    z = kept
    if kept.numel() == 0:
        rows = permute.permute(x, *maps)
        z = gemm.grouped_gemm(rows, w_gate_up, b_gate_up, *groups, weight_layout)
        del rows
    weight_of_row = permute.gather_values(topk_weights.flatten(), slot_of_row)
    d_y = permute.permute(grad, *maps)  # before the weights
    d_a = gemm.grouped_gemm(d_y, w_down, None, *groups, transposed)
    d_z, weighted, d_weight_of_row = activation.experts_backward(
        d_a, z, weight_of_row, kind, gate_up_layout
    )
    if need_w2:
        d_w2 = weight_gradient(d_y, weighted, w_down)
    if need_b2:
        d_b2 = gemm.bias_gradient(d_y, *groups, weight_of_row)
    if need_weights:
        if b_down is not None:
            row = b_down[:, None, :]
            dots = gemm.grouped_gemm(d_y, row, None, *groups, "ENK", d_weight_of_row.dtype)
            d_weight_of_row += dots[:, 0]
        d_weights = permute.gather_values(d_weight_of_row, row_of_slot.flatten())
        d_weights = d_weights.view(row_of_slot.shape).to(topk_weights.dtype)
    del d_y, d_a, weighted
    if need_w1:
        d_w1 = weight_gradient(d_z, permute.permute(x, *maps), w_gate_up)
    if need_b1:
        d_b1 = gemm.bias_gradient(d_z, *groups)
    if need_x:
        d_rows = gemm.grouped_gemm(d_z, w_gate_up, None, *groups, transposed)
        d_x = unpermute.sum_rows(d_rows, row_of_slot)
    return [d_x, d_weights, d_w1, d_w2, d_b1, d_b2]
