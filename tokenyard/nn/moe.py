"""The Mixture-of-Experts block: router, experts, and an optional shared expert."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenyard.nn.experts import Experts
from tokenyard.nn.router import Router
from tokenyard.ops.activation import Activation
from tokenyard.routing import route


class MoEStatistics(NamedTuple):
    """What the router did, for losses and logging.

    router_logits [T,E] fp32, topk_weights [T,K] fp32, topk_indices [T,K] int32 as chosen,
    tokens_per_expert [E] int32 and num_dropped [] int32 after capacity.
    """

    router_logits: Tensor
    topk_weights: Tensor
    topk_indices: Tensor
    tokens_per_expert: Tensor
    num_dropped: Tensor


class SharedExpert(nn.Module):
    """A swiglu MLP that every token passes through: gate_proj, up_proj, down_proj."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def linear(size_in: int, size_out: int) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=False, device=device, dtype=dtype)

        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """out = experts(x) + shared_expert(x) (* sigmoid(shared_expert_gate(x))).

    shared_intermediate_size   width of the shared expert; None for no shared expert
    shared_gate                weigh the shared expert by a sigmoid gate (Qwen2-MoE, Qwen3-Next)
    capacity_factor            most slots per expert as a multiple of the mean T*K/E; None drops none
    drop                       which slots go beyond it, see `tokenyard.route`
    router                     options of `Router` beyond its sizes; default: softmax over all experts,
                               weights renormalised to sum 1 (Mixtral, Qwen3-MoE)
    experts                    options of `Experts` beyond its sizes and activation

    State dict: gate.weight, experts.gate_up_proj, experts.down_proj, shared_expert.*, ...

    >>> import torch
    >>> moe = MoE(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
    >>> out, statistics = moe(torch.randn(2, 5, 64))
    >>> out.shape, statistics.tokens_per_expert.sum()
    (torch.Size([2, 5, 64]), tensor(20))
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation = "swiglu",
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        capacity_factor: float | None = None,
        drop: Literal["position", "weight"] = "position",
        router: dict[str, Any] | None = None,
        experts: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.capacity_factor, self.drop = capacity_factor, drop
        options = {"normalize": "sum"} if router is None else router
        self.gate = Router(hidden_size, num_experts, top_k, device=device, dtype=dtype, **options)
        self.experts = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            activation=activation,
            device=device,
            dtype=dtype,
            **(experts or {}),
        )
        self.shared_expert: SharedExpert | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_intermediate_size is not None:
            self.shared_expert = SharedExpert(
                hidden_size, shared_intermediate_size, device=device, dtype=dtype
            )
            if shared_gate:
                self.shared_expert_gate = nn.Linear(
                    hidden_size, 1, bias=False, device=device, dtype=dtype
                )
        elif shared_gate:
            raise ValueError("tokenyard.nn.MoE: shared_gate needs shared_intermediate_size")

    def capacity(self, num_tokens: int) -> int | None:
        """Most slots that one expert takes of `num_tokens` tokens; None for no bound."""
        if self.capacity_factor is None:
            return None
        mean = num_tokens * self.gate.top_k / self.gate.num_experts
        return int(-(-mean * self.capacity_factor // 1))

    def forward(
        self, x: Tensor, topk_indices: Tensor | None = None
    ) -> tuple[Tensor, MoEStatistics]:
        """x [...,H] -> (out [...,H], statistics); `topk_indices` [T,K] replace the router's choice."""
        tokens = x.reshape(-1, x.shape[-1])
        router_logits, topk_weights, indices = self.gate(tokens, topk_indices)
        routing = route(
            indices,
            self.gate.num_experts,
            capacity=self.capacity(tokens.shape[0]),
            drop=self.drop,
            topk_weights=topk_weights,
        )
        out = self.experts(tokens, routing, topk_weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(tokens).sigmoid() * shared
            out = out + shared
        statistics = MoEStatistics(
            router_logits, topk_weights, indices, routing.tokens_per_expert, routing.num_dropped
        )
        return out.view(x.shape), statistics
