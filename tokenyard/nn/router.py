"""The router: `router_logits`, then `topk`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenyard import check
from tokenyard.nn.router_configs import router_options
from tokenyard.ops.losses import update_selection_bias
from tokenyard.ops.router_logits import router_logits
from tokenyard.ops.topk import topk


class RouterOutput(NamedTuple):
    """router_logits [T,E] fp32, topk_weights [T,K] fp32, topk_indices [T,K] int32."""

    router_logits: Tensor
    topk_weights: Tensor
    topk_indices: Tensor


TOPK_OPTIONS = sorted((topk.__kwdefaults__ or {}).keys() - {"selection_bias", "topk_indices"})


class Router(nn.Module):
    """`router_logits`, x W^T (+ bias), then `topk` with its options.

    bias             the linear layer has one (gpt-oss)
    selection_bias   keep a buffer `e_score_correction_bias` [E], moved towards balance by
                     `update_selection_bias` (DeepSeek-V3); it chooses experts and weighs none
    jitter           in training, every element of x is multiplied by a random factor from 1 - jitter to
                     1 + jitter before the linear layer (Switch)
    force_balance    choose experts in turns, whatever the logits, which still weigh them: for benchmarks
    topk_options     options of `tokenyard.topk`: score, normalize, num_groups, scale, ...

    Parameters: weight [E,H], bias [E]. Logits are computed in fp32 whatever the dtype of the model,
    also under autocast, and their bits do not depend on it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        selection_bias: bool = False,
        jitter: float = 0.0,
        force_balance: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **topk_options: Any,
    ) -> None:
        super().__init__()
        check.at_least("nn.Router", "top_k", top_k, 1)
        if top_k > num_experts:
            check.fail("nn.Router", "top_k", f"1 to E = {num_experts}", top_k)
        check.number("nn.Router", "jitter", jitter)
        if not 0 <= jitter < 1:
            check.fail("nn.Router", "jitter", "0 to 1, 1 excluded", jitter)
        for option in topk_options:
            check.choice("nn.Router", "topk_options", option, TOPK_OPTIONS)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.jitter, self.force_balance, self.topk_options = jitter, force_balance, topk_options
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype))
        self.e_score_correction_bias: Tensor | None
        correction = torch.zeros(num_experts, device=device) if selection_bias else None
        self.register_buffer("e_score_correction_bias", correction)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> "Router":
        """The router of a model, from its config of Hugging Face transformers; `options` come before it.

        Its weights are the model's, under other names in some: weight, bias, and the buffer
        e_score_correction_bias. Raises ArgumentError for a model type that is not in docs/routers.md.
        """
        return cls(**(router_options(config) | options))

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move the selection bias, but keep it fp32: in bf16 its steps of 1e-3 would round away."""
        kept = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.e_score_correction_bias
        if kept is not None and moved is not None and moved.dtype != kept.dtype:
            self.e_score_correction_bias = kept.to(moved.device)
        return self

    def forward(self, x: Tensor, topk_indices: Tensor | None = None) -> RouterOutput:
        """x [T,H]; `topk_indices` [T,K] are used instead of a choice (replay, hash routing)."""
        check.tensor("nn.Router", "x", x, ["T", self.hidden_size])
        if self.jitter > 0 and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        if self.force_balance and topk_indices is None:
            slots = torch.arange(x.shape[0] * self.top_k, dtype=torch.int32, device=x.device)
            topk_indices = (slots % self.num_experts).view(-1, self.top_k)
        logits = router_logits(x, self.weight, self.bias)
        weights, indices = topk(
            logits,
            self.top_k,
            selection_bias=self.e_score_correction_bias,
            topk_indices=topk_indices,
            **self.topk_options,
        )
        return RouterOutput(logits, weights, indices)

    def update_selection_bias(self, tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
        """Move the selection bias towards balance, in place (once per optimizer step)."""
        if self.e_score_correction_bias is None:
            raise RuntimeError("tokenyard.nn.Router: made with selection_bias=False, has no bias")
        update_selection_bias(self.e_score_correction_bias, tokens_per_expert, rate=rate)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.topk_options.items())
        return f"{self.hidden_size}, {self.num_experts}, top_k={self.top_k}{options}"
