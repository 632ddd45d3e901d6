"""The Mixture-of-Experts block: router, experts, and an optional shared expert."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenyard import check
from tokenyard.nn.experts import Experts
from tokenyard.nn.router import Router
from tokenyard.ops.activation import Activation
from tokenyard.routing import Routing, route


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


class Dispatched(NamedTuple):
    """out [T,H] of the experts, that of the shared expert or None, and counts as in `MoEStatistics`."""

    out: Tensor
    shared: Tensor | None
    tokens_per_expert: Tensor
    num_dropped: Tensor


class Dispatcher(Protocol):
    """What `tokenyard.parallel` puts in place of the plain call of the experts."""

    def __call__(
        self,
        experts: Experts,
        x: Tensor,
        routing: Routing,
        topk_weights: Tensor,
        shared: Callable[[Tensor], Tensor | None],
    ) -> Dispatched: ...


def call_experts(
    experts: Experts,
    x: Tensor,
    routing: Routing,
    topk_weights: Tensor,
    shared: Callable[[Tensor], Tensor | None],
) -> Dispatched:
    """All experts on this device."""
    out = experts(x, routing, topk_weights)
    return Dispatched(out, shared(x), routing.tokens_per_expert, routing.num_dropped)


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
    router                     options of `Router` beyond its sizes; weights are renormalised to sum 1
                               (Mixtral, Qwen3-MoE) unless they include `normalize`
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
        self.dispatcher: Dispatcher = call_experts
        self.capacity_factor, self.drop = capacity_factor, drop
        self._capacity_ratio: Fraction | None = None
        if capacity_factor is not None:
            check.number("nn.MoE", "capacity_factor", capacity_factor)
            if not 0 <= capacity_factor < math.inf:
                check.fail(
                    "nn.MoE", "capacity_factor", "a finite number from 0 on", capacity_factor
                )
            # the decimal that was written, so that 1.1 of 100 is 110
            self._capacity_ratio = Fraction(str(capacity_factor)) * top_k / num_experts
        check.choice("nn.MoE", "drop", drop, ("position", "weight"))
        options = {"normalize": "sum"} | (router or {})
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
        ratio = self._capacity_ratio
        return None if ratio is None else -(-num_tokens * ratio.numerator // ratio.denominator)

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
        out, shared, tokens_per_expert, num_dropped = self.dispatcher(
            self.experts, tokens, routing, topk_weights, self._shared
        )
        if shared is not None:
            out = out + shared
        statistics = MoEStatistics(
            router_logits, topk_weights, indices, tokens_per_expert, num_dropped
        )
        return out.view(x.shape), statistics

    def _shared(self, tokens: Tensor) -> Tensor | None:
        if self.shared_expert is None:
            return None
        shared: Tensor = self.shared_expert(tokens)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(tokens).sigmoid() * shared
        return shared
