"""torchtitan's grouped experts and its local token dispatcher by Tokenyard, without an import of torchtitan.

Its experts keep three matrices apart: w1 [E,F,D] gate, w2 [E,D,F] down, w3 [E,F,D] up, and compute
w2 (silu(w1 x) * w3 x) for rows that are sorted by expert. Each matrix is read as it lies: two GEMMs of the
same rows cost R D elements more than one, a concatenation of w1 and w3 would move 4 E F D in every step.

    tokenyard.integrations.torchtitan.use(model)    # replaces the forward of every such module
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tokenyard
from tokenyard import Routing, check


def grouped_experts(
    w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor
) -> Tensor:
    """x [R,D] sorted by expert, num_tokens_per_expert [E] integers on its device -> [R,D].

    Rows past the last expert's come out zero. Computes in the dtype of the weights; the result has that of x.
    Differentiable in x and the matrices. Raises ArgumentError.
    """
    name = "integrations.torchtitan.grouped_experts"
    w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (w1, w2, w3))
    check.tensor(name, "w1", w1, ["E", "F", "D"])
    num_experts, inner, hidden = w1.shape
    check.tensor(name, "w2", w2, [num_experts, hidden, inner])
    check.tensor(name, "w3", w3, [num_experts, inner, hidden])
    check.tensor(name, "num_tokens_per_expert", num_tokens_per_expert, [num_experts])
    offsets = F.pad(num_tokens_per_expert.cumsum(0, dtype=torch.int32), (1, 0))
    rows = x.to(w1.dtype)
    gate = tokenyard.grouped_gemm(rows, w1, offsets, layout="ENK")
    up = tokenyard.grouped_gemm(rows, w3, offsets, layout="ENK")
    out = tokenyard.grouped_gemm(F.silu(gate) * up, w2, offsets, layout="ENK")
    return out.to(x.dtype)


def _forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    return grouped_experts(self.w1, self.w2, self.w3, x, num_tokens_per_expert)


class GroupedExperts(nn.Module):
    """torchtitan's module of that name: parameters w1, w2, w3; forward(x, num_tokens_per_expert)."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def parameter(*sizes: int) -> nn.Parameter:
            weight = torch.empty(num_experts, *sizes, device=device, dtype=dtype)
            return nn.Parameter(nn.init.normal_(weight, std=sizes[1] ** -0.5))

        self.w1 = parameter(hidden_dim, dim)
        self.w2 = parameter(dim, hidden_dim)
        self.w3 = parameter(hidden_dim, dim)

    forward = _forward


def use(model: nn.Module) -> nn.Module:
    """Replace the forward of every module with 3-D parameters w1, w2 and w3, and return the model.

    Raises ArgumentError if there is none.
    """
    found = [module for module in model.modules() if _is_grouped(module)]
    if not found:
        expected = "a model with grouped experts (w1, w2, w3 of three dimensions)"
        check.fail("integrations.torchtitan.use", "model", expected, type(model).__name__)
    for module in found:
        module.forward = MethodType(_forward, module)
    return model


def _is_grouped(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return all(name in parameters and parameters[name].dim() == 3 for name in ("w1", "w2", "w3"))


@dataclass(frozen=True, kw_only=True)
class LocalDispatchMetadata:
    """What `combine` needs of `dispatch`; scores are None where the rows have been weighted already."""

    routing: Routing
    topk_scores: Tensor | None


class LocalTokenDispatcher:
    """torchtitan's dispatcher for one device: tokens to rows sorted by expert, and back.

    score_before_experts   weigh the rows rather than the outputs (torchtitan's older default)
    row_alignment          pad every expert's rows to a multiple of this; the counts then include padding,
                           and the rows have the static size of `tokenyard.route`
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        score_before_experts: bool = False,
        row_alignment: int = 1,
    ) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.score_before_experts, self.row_alignment = score_before_experts, row_alignment

    def dispatch(
        self,
        x: Tensor,
        topk_scores: Tensor,
        topk_expert_ids: Tensor,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, LocalDispatchMetadata]:
        """x [T,D], scores and ids [T,K] -> (rows [R,D], rows of each expert [E], metadata).

        num_tokens_per_expert is counted again with the routing, and not read.
        """
        routing = tokenyard.route(
            topk_expert_ids, self.num_experts, row_alignment=self.row_alignment
        )
        rows = tokenyard.permute(x, routing)
        counts = routing.expert_offsets.diff()
        if not self.score_before_experts:
            return rows, counts, LocalDispatchMetadata(routing=routing, topk_scores=topk_scores)
        scores = tokenyard.permute_slots(topk_scores, routing)
        rows = (rows.float() * scores.float()[:, None]).to(x.dtype)
        return rows, counts, LocalDispatchMetadata(routing=routing, topk_scores=None)

    def combine(self, rows: Tensor, metadata: LocalDispatchMetadata, x: Tensor, **_: Any) -> Tensor:
        """rows [R,D] -> [T,D] in the dtype of x, summed in fp32 in the order of each token's choices."""
        out = tokenyard.unpermute(rows, metadata.routing, metadata.topk_scores)
        return out.to(x.dtype)
