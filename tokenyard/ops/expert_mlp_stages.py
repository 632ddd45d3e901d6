"""`expert_mlp` as kernels: nothing is read on the host, x and the pre-activation z alone are kept.

forward    up with the activation, down, weighted sum
backward   down transposed; the activation's gradient, which also gives w a and <d_a, a>; gradients of both
           weights; up transposed; sum
The rows of x are gathered as they are multiplied, or put side by side before.
"""

from types import ModuleType

from torch import Tensor

from tokenyard import backend

Stages = tuple[ModuleType, ModuleType, ModuleType, ModuleType]


def stages_of(x: Tensor) -> Stages | None:
    """The kernels of the experts, the GEMMs and the moves that they are made of, or None."""
    experts = backend.kernels("expert_mlp", x)
    names = ("grouped_gemm", "permute", "unpermute")
    gemm, permute, unpermute = (backend.kernels(name, x) for name in names)
    if experts is None or gemm is None or permute is None or unpermute is None:
        return None
    return experts, gemm, permute, unpermute


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
    order: str,
    ep_size: int,
    within_rank: str,
    across_ranks: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(out, z); z is empty unless it is to be kept."""
    _, gemm, _, unpermute = stages
    groups = expert_offsets, tokens_per_expert
    forms = kind, gate_up_layout, weight_layout
    maps = row_of_slot, slot_of_row
    a, z = _up(stages, x, w_gate_up, b_gate_up, *maps, *groups, *forms, keep)
    y = gemm.grouped_gemm(a, w_down, b_down, *groups, weight_layout)
    num_experts = tokens_per_expert.shape[0]
    reduction = order, ep_size, within_rank, across_ranks
    return unpermute.combine(y, topk_weights, row_of_slot, topk_indices, num_experts, *reduction), z


def _up(
    stages: Stages,
    x: Tensor,
    w_gate_up: Tensor,
    b_gate_up: Tensor | None,
    row_of_slot: Tensor,
    slot_of_row: Tensor,
    expert_offsets: Tensor,
    tokens_per_expert: Tensor,
    kind: str,
    gate_up_layout: str,
    weight_layout: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(a, z or nothing)."""
    experts, _, permute, _ = stages
    (num_rows,), (_, top_k) = slot_of_row.shape, row_of_slot.shape
    slots: Tensor | None = slot_of_row
    if not experts.gathers(x, num_rows, w_gate_up):
        x, slots = permute.permute(x, row_of_slot, slot_of_row), None
    out_major = weight_layout == "ENK"
    operands = x, slots, top_k, w_gate_up, b_gate_up, expert_offsets, tokens_per_expert
    a, z = experts.up(*operands, out_major, kind, gate_up_layout, num_rows, keep)
    return a, z


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
    topk_indices: Tensor,
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
    experts, gemm, permute, unpermute = stages
    need_x, need_weights, need_w1, need_w2, need_b1, need_b2 = need
    groups = expert_offsets, tokens_per_expert
    maps = row_of_slot, slot_of_row
    forms = kind, gate_up_layout, weight_layout
    out_major = weight_layout == "ENK"
    transposed = "EKN" if out_major else "ENK"
    d_x = d_weights = d_w1 = d_w2 = d_b1 = d_b2 = x.new_empty(0)

    def weight_gradient(d_out: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        d_weight = weight.new_empty(weight.shape)
        operands = (d_out, rows) if out_major else (rows, d_out)
        gemm.weight_gradient(*operands, *groups, d_weight, False)
        return d_weight

    z = kept
    if kept.numel() == 0:
        _, z = _up(stages, x, w_gate_up, b_gate_up, *maps, *groups, *forms, True)
    d_y = permute.permute(grad, *maps)  # before the weights
    weighted = gemm.grouped_gemm(d_y, w_down, None, *groups, transposed)  # d_a at first
    operands = weighted, z, topk_weights, slot_of_row
    d_z, dots = experts.activation_gradient(*operands, kind, gate_up_layout)
    if need_w2:
        d_w2 = weight_gradient(d_y, weighted, w_down)
    del weighted
    if need_b2:
        weight_of_row = permute.gather_values(topk_weights.flatten(), slot_of_row)
        d_b2 = gemm.bias_gradient(d_y, *groups, weight_of_row)
    if need_weights:
        d_weights = experts.weights_gradient(
            dots, row_of_slot, grad, b_down, topk_indices, topk_weights.dtype
        )
    del d_y
    if need_w1:
        d_w1 = weight_gradient(d_z, permute.permute(x, *maps), w_gate_up)
    if need_b1:
        d_b1 = gemm.bias_gradient(d_z, *groups)
    if need_x:
        d_rows = gemm.grouped_gemm(d_z, w_gate_up, None, *groups, transposed)
        d_x = unpermute.sum_rows(d_rows, row_of_slot)
    return [d_x, d_weights, d_w1, d_w2, d_b1, d_b2]
