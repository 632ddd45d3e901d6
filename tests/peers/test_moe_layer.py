"""Whole layers of installed peers beside ours and one definition: the same function, the same gradients."""

import pytest
import torch

from benchmarks import layer_peers, moe_layer
from benchmarks.shapes import Shape

SMALL = Shape("small", T=2048, K=4, E=16, H=512, I=256)
TINY = Shape("tiny", T=96, K=4, E=16, H=64, I=32)
OURS = [moe_layer.ours, moe_layer.ours_as_module, layer_peers.composed]


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("expert", [0, 7])
def test_definition_and_plain_torch_agree(make, expert: int) -> None:
    layer = moe_layer.layer_of(TINY, "cpu", torch.float32)
    errors = moe_layer.Definition(layer, expert).errors(make(layer))
    assert max(errors.values()) < 2e-6, errors


def test_no_token_is_tied() -> None:
    layer = moe_layer.layer_of(TINY, "cpu")
    highest = torch.nn.functional.linear(layer.x, layer.gate).topk(TINY.K + 1).values
    assert (highest[:, -2] > highest[:, -1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [moe_layer.ours, layer_peers.composed])
def test_sides_compute_the_layer(make) -> None:
    layer = moe_layer.layer_of(SMALL)
    errors = moe_layer.Definition(layer, 7).errors(make(layer))
    assert max(errors.values()) < moe_layer.LIMIT, errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", layer_peers.PEERS)
def test_peers_compute_the_layer(name: str) -> None:
    layer = moe_layer.layer_of(SMALL)
    side = layer_peers.made(name, layer)
    if isinstance(side, str):
        pytest.skip(side)
    errors = moe_layer.Definition(layer, 7).errors(side)
    assert max(errors.values()) < 4 * moe_layer.LIMIT, errors
