"""The experts' weights, stacked."""

import math

import torch
from torch import Tensor, nn

from tokenyard import check
from tokenyard.ops.activation import UNGATED, Activation, GateUpLayout, check_activation
from tokenyard.ops.expert_mlp import expert_mlp
from tokenyard.ops.expert_mlp_parts import WEIGHTS_ON, LoRA, WeightsOn
from tokenyard.ops.grouped_gemm import LAYOUTS, WeightLayout
from tokenyard.ops.unpermute import Reduction
from tokenyard.routing import Routing


class Experts(nn.Module):
    """`expert_mlp` with its weights, under the names and in the layout of Hugging Face transformers.

    Parameters: gate_up_proj [E,2I,H] (up_proj [E,I,H] for ungated activations), down_proj [E,H,I];
    with `bias` gate_up_proj_bias [E,2I] (up_proj_bias [E,I]) and down_proj_bias [E,H]; weights are
    [E,H,2I] and [E,I,H] with weight_layout "EKN" (gpt-oss). Options as in `tokenyard.expert_mlp`.
    `add_lora` freezes them and adds <weight>_lora_a [E,r,in] and <weight>_lora_b [E,out,r].
    Parameters may be DTensors: the experts are then those of this process's shards.
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
        weights_on: WeightsOn = "output",
        reduction: Reduction = "slot",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation("nn.Experts", "activation", activation, "gate_up_layout", gate_up_layout)
        check.choice("nn.Experts", "weight_layout", weight_layout, LAYOUTS)
        check.choice("nn.Experts", "weights_on", weights_on, WEIGHTS_ON)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        self.gate_up_layout, self.weight_layout = gate_up_layout, weight_layout
        self.weights_on, self.reduction, self.recompute = weights_on, reduction, recompute

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
        self.lora_scale: float | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("_bias", "_lora_b")):
                nn.init.zeros_(parameter)
            else:
                size_in = (
                    self.intermediate_size if name.startswith("down_proj") else self.hidden_size
                )
                bound = 1 / math.sqrt(size_in)
                nn.init.uniform_(parameter, -bound, bound)

    def add_lora(self, rank: int, alpha: float | None = None) -> None:
        """Freeze all parameters, and add to both weights of every expert factors of this rank (LoRA).

        An addition is alpha / rank times b a; alpha is by default rank. b starts at zero, so that nothing
        changes at first.
        """
        check.at_least("nn.Experts.add_lora", "rank", rank, 1)
        alpha = rank if alpha is None else alpha
        check.number("nn.Experts.add_lora", "alpha", alpha)
        if self.lora_scale is not None:
            raise RuntimeError("tokenyard.nn.Experts: add_lora: factors are there already")
        self.requires_grad_(False)
        self.lora_scale = alpha / rank
        for name in (self._first, "down_proj"):
            weight = getattr(self, name)
            sizes = weight.shape[1:]
            size_out, size_in = sizes if self.weight_layout == "ENK" else reversed(sizes)
            a = nn.Parameter(weight.new_empty(self.num_experts, rank, size_in))
            nn.init.uniform_(a, -1 / math.sqrt(size_in), 1 / math.sqrt(size_in))
            self.register_parameter(f"{name}_lora_a", a)
            b = nn.Parameter(weight.new_zeros(self.num_experts, size_out, rank))
            self.register_parameter(f"{name}_lora_b", b)

    def merge_lora(self) -> None:
        """Put the additions of `add_lora` into the weights, and remove their factors."""
        for name in (self._first, "down_proj"):
            lora = self._lora(name)
            if lora is None:
                raise RuntimeError("tokenyard.nn.Experts: merge_lora: there are no factors")
            weight = getattr(self, name).detach()
            for matrix, a, b in zip(weight, lora.a.detach(), lora.b.detach()):
                product = (b.float() @ a.float()).mul_(lora.scale)
                matrix.add_(product if self.weight_layout == "ENK" else product.t())
            delattr(self, f"{name}_lora_a")
            delattr(self, f"{name}_lora_b")
        self.lora_scale = None

    def _lora(self, name: str) -> LoRA | None:
        if self.lora_scale is None:
            return None
        a, b = self._local(f"{name}_lora_a"), self._local(f"{name}_lora_b")
        assert a is not None and b is not None
        return LoRA(a, b, self.lora_scale)

    def _local(self, name: str) -> Tensor | None:
        """A parameter, or this process's shard of it."""
        parameter = getattr(self, name)
        return parameter.to_local() if hasattr(parameter, "to_local") else parameter

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        topk_weights: Tensor,
        *,
        weights_on: WeightsOn | None = None,
        reduction: Reduction | None = None,
    ) -> Tensor:
        """x [T,H], topk_weights [T,K] -> [T,H]; options that are given replace those of the module."""
        w_gate_up, w_down = self._local(self._first), self._local("down_proj")
        assert w_gate_up is not None and w_down is not None
        return expert_mlp(
            x,
            routing,
            topk_weights,
            w_gate_up,
            w_down,
            b_gate_up=self._local(f"{self._first}_bias"),
            b_down=self._local("down_proj_bias"),
            activation=self.activation,
            gate_up_layout=self.gate_up_layout,
            weight_layout=self.weight_layout,
            weights_on=weights_on or self.weights_on,
            lora_gate_up=self._lora(self._first),
            lora_down=self._lora("down_proj"),
            reduction=reduction or self.reduction,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, "
            f"activation={self.activation!r}"
        )
