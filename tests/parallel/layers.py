"""A mixture of experts on every rank, and on one process with the tokens of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from world import World

import tokenyard
from tokenyard import parallel

H, I, E, K = 8, 6, 8, 3  # noqa: E741
TOKENS = 5, 0, 9, 4
"""Of each rank; one has none."""


@dataclass(frozen=True)
class Case:
    """Inputs and outputs' gradients of all ranks, one after another, and all experts' weights."""

    x: Tensor
    topk_indices: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    d_out: Tensor
    tokens: tuple[int, ...]

    def part(self, value: Tensor, rank: int) -> Tensor:
        """A rank's tokens."""
        return value.split(self.tokens)[rank]

    def experts(self, value: Tensor, world: World) -> Tensor:
        """A rank's experts."""
        return value.chunk(world.size)[world.rank]


def made(
    world: World,
    dtype: torch.dtype = torch.float32,
    num_experts: int = E,
    choose: Callable[[Tensor], Tensor] | None = None,
    tokens: tuple[int, ...] = TOKENS,
) -> Case:
    """The same on every rank. `choose` changes the choices [T,K]."""
    torch.manual_seed(5)
    tokens = tokens[: world.size]
    num_tokens = sum(tokens)
    indices = torch.rand(num_tokens, num_experts).argsort(1)[:, :K]
    if num_tokens > 2:
        indices[1, 0], indices[2] = -1, num_experts  # both mean none
    if choose is not None:
        indices = choose(indices)
    return Case(
        x=torch.randn(num_tokens, H).to(dtype),
        topk_indices=indices,
        topk_weights=torch.rand(num_tokens, K),
        w_gate_up=torch.randn(num_experts, 2 * I, H).to(dtype),
        w_down=torch.randn(num_experts, H, I).to(dtype),
        d_out=torch.randn(num_tokens, H).to(dtype),
        tokens=tokens,
    )


def differentiate(
    run: Callable[..., Tensor], leaves: list[Tensor], d_out: Tensor
) -> tuple[Tensor, ...]:
    """(out, *gradients)"""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = run(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def alone(case: Case, **options: Any) -> tuple[Tensor, ...]:
    """out, d_x, d_weights, d_w_gate_up, d_w_down of one process."""
    routing = tokenyard.route(case.topk_indices, case.w_gate_up.shape[0])

    def run(x: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        return tokenyard.expert_mlp(x, routing, weights, w_gate_up, w_down, **options)

    leaves = [case.x, case.topk_weights, case.w_gate_up, case.w_down]
    return differentiate(run, leaves, case.d_out)


def mine(case: Case, world: World, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's part of what `alone` returns."""
    of_tokens = [case.part(value, world.rank) for value in results[:3]]
    return *of_tokens, *(case.experts(value, world) for value in results[3:])


def together(
    case: Case,
    world: World,
    transport: Any,
    weights_at: str,
    reduction: Any = None,
    local: Any = "slot",
) -> tuple[Tensor, ...]:
    """The same of one rank."""
    indices = case.part(case.topk_indices, world.rank)

    def run(x: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        sent = parallel.dispatch(
            x,
            indices,
            weights,
            world.group,
            num_global_experts=case.w_gate_up.shape[0],
            transport=transport,
            weights_at=weights_at,
        )
        out = tokenyard.expert_mlp(
            sent.x,
            sent.routing,
            sent.topk_weights,
            w_gate_up,
            w_down,
            weights_on="later" if weights_at == "later" else "output",
            reduction=local,
        )
        return parallel.combine(out, sent, reduction=reduction)

    leaves = [case.part(case.x, world.rank), case.part(case.topk_weights, world.rank)]
    leaves += [case.experts(case.w_gate_up, world), case.experts(case.w_down, world)]
    return differentiate(run, leaves, case.part(case.d_out, world.rank))
