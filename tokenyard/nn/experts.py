"""The experts' weights, stacked."""

import math

import torch
from torch import Tensor, nn

from tokenyard import check
from tokenyard.ops.activation import UNGATED, Activation, GateUpLayout, check_activation
from tokenyard.ops.expert_mlp import expert_mlp
from tokenyard.ops.grouped_gemm import LAYOUTS, WeightLayout
from tokenyard.ops.unpermute import Reduction
from tokenyard.routing import Routing


class Experts(nn.Module):
    """`expert_mlp` with its weights, under the names and in the layout of Hugging Face transformers.

    Parameters: gate_up_proj [E,2I,H] (up_proj [E,I,H] for ungated activations), down_proj [E,H,I];
    with `bias` gate_up_proj_bias [E,2I] (up_proj_bias [E,I]) and down_proj_bias [E,H]; weights are
    [E,H,2I] and [E,I,H] with weight_layout "EKN" (gpt-oss). Options as in `tokenyard.expert_mlp`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        gate_up_layout: GateUpLayout = "concatenated",
        weight_layout: WeightLayout = "ENK",
        reduction: Reduction = "slot",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation("nn.Experts", "activation", activation, "gate_up_layout", gate_up_layout)
        check.choice("nn.Experts", "weight_layout", weight_layout, LAYOUTS)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        self.gate_up_layout, self.weight_layout = gate_up_layout, weight_layout
        self.reduction, self.recompute = reduction, recompute

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        def weight(size_out: int, size_in: int) -> nn.Parameter:
            return parameter(
                *((size_out, size_in) if weight_layout == "ENK" else (size_in, size_out))
            )

        gated = activation not in UNGATED
        self.down_proj_bias: nn.Parameter | None
        self._first = "gate_up_proj" if gated else "up_proj"
        first_size = 2 * intermediate_size if gated else intermediate_size
        self.register_parameter(self._first, weight(first_size, hidden_size))
        self.down_proj = weight(hidden_size, intermediate_size)
        self.register_parameter(f"{self._first}_bias", parameter(first_size) if bias else None)
        self.register_parameter("down_proj_bias", parameter(hidden_size) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                size_in = self.intermediate_size if name == "down_proj" else self.hidden_size
                bound = 1 / math.sqrt(size_in)
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, routing: Routing, topk_weights: Tensor) -> Tensor:
        """x [T,H], topk_weights [T,K] -> [T,H]."""
        return expert_mlp(
            x,
            routing,
            topk_weights,
            getattr(self, self._first),
            self.down_proj,
            b_gate_up=getattr(self, f"{self._first}_bias"),
            b_down=self.down_proj_bias,
            activation=self.activation,
            gate_up_layout=self.gate_up_layout,
            weight_layout=self.weight_layout,
            reduction=self.reduction,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, "
            f"activation={self.activation!r}"
        )
