"""torchtitan's layout and dispatcher protocol, against modules written from it in plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenyard
from tokenyard.integrations import torchtitan
from tokenyard.integrations.torchtitan import GroupedExperts, LocalTokenDispatcher

T, K, E, D, HIDDEN = 19, 2, 5, 6, 4
F64 = torch.float64


class PlainExperts(nn.Module):
    """One expert after another."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, HIDDEN, D, dtype=F64))
        self.w2 = nn.Parameter(torch.randn(E, D, HIDDEN, dtype=F64))
        self.w3 = nn.Parameter(torch.randn(E, HIDDEN, D, dtype=F64))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = torch.split(x, num_tokens_per_expert.tolist())
        return torch.cat(
            [
                (F.silu(part @ w1.T) * (part @ w3.T)) @ w2.T
                for part, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3)
            ]
        )


class Block(nn.Module):
    """dispatch, experts, combine, as torchtitan's layer calls them."""

    def __init__(self, experts: nn.Module, dispatcher: Any) -> None:
        super().__init__()
        self.experts, self.dispatcher = experts, dispatcher

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        counts = torch.bincount(ids.flatten(), minlength=E)
        rows, counts, metadata = self.dispatcher.dispatch(x, scores, ids, counts)
        out = self.experts(rows, counts)
        return self.dispatcher.combine(out, metadata, x, num_local_tokens_after_padding=T)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(T, E - 1).topk(K).indices  # the last expert has no token
    return torch.randn(T, D, dtype=F64), torch.rand(T, K), ids


def want(experts: PlainExperts, x: Tensor, scores: Tensor, ids: Tensor, before: bool) -> Tensor:
    rows = []
    for t in range(T):
        total = torch.zeros(D, dtype=F64)
        for k in range(K):
            e, score = int(ids[t, k]), scores[t, k].double()
            row = x[t] * score if before else x[t]
            y = experts.w2[e] @ (F.silu(experts.w1[e] @ row) * (experts.w3[e] @ row))
            total = total + (y if before else y * score)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("row_alignment", [1, 8])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_a_layer_by_the_protocol(before: bool, row_alignment: int) -> None:
    experts = PlainExperts()
    dispatcher = LocalTokenDispatcher(
        E, K, score_before_experts=before, row_alignment=row_alignment
    )
    block = torchtitan.use(Block(experts, dispatcher))
    x, scores, ids = inputs()
    leaves = [x.requires_grad_(), scores.requires_grad_(), *experts.parameters()]
    out, expected = block(x, scores, ids), want(experts, x, scores, ids, before)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if before else {}  # weighted in fp32
    torch.testing.assert_close(out, expected, **tolerance)
    grad = torch.randn_like(out)
    for got, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    ):
        torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-5)


def test_rows_are_those_of_a_stable_sort() -> None:
    """Which torchtitan's own dispatcher makes, so that either half can be replaced alone."""
    x, scores, ids = inputs()
    rows, counts, _ = LocalTokenDispatcher(E, K).dispatch(x, scores, ids)
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(rows, x[order // K])
    assert counts.tolist() == torch.bincount(ids.flatten(), minlength=E).tolist()


def test_the_module_has_the_parameters_of_torchtitan_and_takes_bf16() -> None:
    experts = GroupedExperts(D, HIDDEN, E, dtype=torch.bfloat16)
    shapes = {name: tuple(value.shape) for name, value in experts.named_parameters()}
    assert shapes == {"w1": (E, HIDDEN, D), "w2": (E, D, HIDDEN), "w3": (E, HIDDEN, D)}
    x = torch.randn(7, D)
    out = experts(x, torch.tensor([3, 0, 2, 2, 0]))
    assert out.dtype == torch.float32
    plain = PlainExperts()
    plain.load_state_dict(experts.state_dict())
    expected = plain(x.double(), torch.tensor([3, 0, 2, 2, 0]))
    assert (out - expected).norm() < 2e-2 * expected.norm()


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    experts = GroupedExperts(D, HIDDEN, E)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    x, counts = torch.randn(7, D), torch.tensor([3, 0, 2, 2, 0])
    torch.testing.assert_close(compiled(x, counts), experts(x, counts))


def test_refusals() -> None:
    with pytest.raises(tokenyard.ArgumentError, match="`model`: expected a model with grouped"):
        torchtitan.use(nn.Linear(2, 2))
    experts = GroupedExperts(D, HIDDEN, E)
    with pytest.raises(tokenyard.ArgumentError, match="`num_tokens_per_expert`: expected shape"):
        experts(torch.randn(7, D), torch.tensor([7]))
