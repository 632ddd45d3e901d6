"""The registration of every operator, on inputs of any strides: what is promised is what comes out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CALLS, SPECIAL
from torch import Tensor

import tokenyard
from tokenyard.registration import Operator


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def row_strided(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def registered_calls(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The registered operators that a call reaches, with their arguments."""
    calls: list[Any] = []
    original = Operator.__call__

    def record(self: Operator, *args: Any) -> Any:
        calls.append((self.registered, args))
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Operator, "__call__", record)
        call()
    return calls


MORE = {
    "topk": lambda x: tokenyard.topk(x, 2, normalize="sum"),
    "topk, groups": lambda x: tokenyard.topk(x, 2, score="sigmoid", num_groups=2, topk_groups=1),
    "activation": lambda x: tokenyard.activation(x, "swiglu", "interleaved"),
    "activation, ungated": lambda x: tokenyard.activation(x, "gelu"),
}


@pytest.mark.parametrize("strided", [transposed, expanded, row_strided])
@pytest.mark.parametrize("name", [*CALLS, *MORE])
def test_registered_as_it_behaves(
    name: str, strided: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in MORE:
        leaf = strided(torch.randn(6, 8)).detach().requires_grad_()
        calls = registered_calls(lambda: MORE[name](leaf), monkeypatch)
    else:
        routing = SPECIAL["first expert empty"].route()
        inputs = [
            strided(torch.randn(shape)).detach().requires_grad_()
            for shape in CALLS[name].shapes(routing)
        ]
        calls = registered_calls(lambda: CALLS[name](routing, *inputs), monkeypatch)
    assert calls
    for operator, args in calls:
        torch.library.opcheck(operator, args)
