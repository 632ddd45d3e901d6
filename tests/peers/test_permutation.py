"""The functions of installed peers beside ours, on a GPU: the same rows, the same sums."""

import pytest
import torch
from torch import Tensor

import tokenyard
from benchmarks import peers
from tokenyard import conventions

pytestmark = pytest.mark.gpu
T, E, K, H = 4096, 64, 6, 2048


@pytest.fixture
def ids() -> Tensor:
    return torch.rand(T, E, device="cuda").topk(K).indices.int()


@pytest.fixture
def weights() -> Tensor:
    return torch.rand(T, K, device="cuda")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def need(functions: peers.Functions, name: str) -> object:
    for label, function in functions.items():
        if label.startswith(name):
            return function()
    pytest.skip(f"{name} is not installed")


def test_transformer_engine_permutes_the_same_rows(ids: Tensor) -> None:
    x, routing = randn(T, H), tokenyard.route(ids, E)
    theirs = need(peers.permute(x, ids, E), "TransformerEngine")
    assert torch.equal(tokenyard.permute(x, routing), theirs[0])


def test_transformer_engine_makes_the_same_map(ids: Tensor) -> None:
    theirs = need(peers.route(ids, E), "TransformerEngine")
    ours = conventions.to_mask_map(tokenyard.route(ids, E))
    fan_out = ours[:, -1:]
    cell = torch.arange(2 * E + 1, device="cuda")
    written = (cell % E < fan_out) & (cell < 2 * E) | (cell == 2 * E)
    assert torch.equal(ours.masked_fill(~written, 0), theirs.int().masked_fill(~written, 0))


@pytest.mark.parametrize("peer", ["TransformerEngine", "moe_ops"])
def test_sums_agree(peer: str, ids: Tensor, weights: Tensor) -> None:
    routing = tokenyard.route(ids, E)
    rows = randn(T * K, H)
    theirs = need(peers.unpermute(rows, ids, weights, E), peer)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    ours = tokenyard.unpermute(rows, routing, weights)
    torch.testing.assert_close(ours, theirs.view_as(ours), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("peer", ["TransformerEngine", "moe_ops"])
def test_gradients_agree(peer: str, ids: Tensor, weights: Tensor) -> None:
    routing = tokenyard.route(ids, E)
    rows, grad = randn(T * K, H).requires_grad_(), randn(T, H)
    weights.requires_grad_()
    theirs = need(peers.unpermute_backward(grad, rows.detach(), ids, weights.detach(), E), peer)
    tokenyard.unpermute(rows, routing, weights).backward(grad)
    torch.testing.assert_close(rows.grad, theirs[0].view_as(rows), rtol=2e-2, atol=2e-2)
    d_weights = theirs[1]
    if peer == "TransformerEngine":
        d_weights = d_weights.gather(1, ids.long())
    torch.testing.assert_close(
        weights.grad, d_weights.view_as(weights).float(), rtol=2e-2, atol=1.0
    )


def test_moe_ops_permutes_the_same_rows(ids: Tensor) -> None:
    """In another order within an expert, which its sort leaves open; its own map tells."""
    x, routing = randn(T, H), tokenyard.route(ids, E)
    rows, row_id_map, offsets = need(peers.permute(x, ids, E), "moe_ops")
    assert torch.equal(offsets.int(), routing.expert_offsets)
    ours = tokenyard.permute(x, routing)
    slots = conventions.to_row_id_map(routing).long()
    assert torch.equal(ours[slots], rows[row_id_map.long()])


def test_moe_ops_weighs_alike() -> None:
    logits = torch.randn(T, E, device="cuda").bfloat16()
    theirs, their_ids = need(peers.topk(logits, K), "moe_ops")
    ours, our_ids = tokenyard.topk(logits, K, score="softmax_of_selected")
    # ids may differ where bf16 logits tie, what they select may not
    assert torch.equal(logits.gather(1, our_ids.long()), logits.gather(1, their_ids.long()))
    torch.testing.assert_close(ours, theirs.float(), rtol=2e-2, atol=2e-3)
