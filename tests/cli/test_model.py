"""The byte model: causal, relative in position, reproducible from its seed."""

import math
from dataclasses import replace

import pytest
import torch

from tokenyard.cli.model import (
    auxiliary_losses,
    bits_per_byte,
    build_model,
    evaluate,
    generate,
    rotate,
    update_selection_biases,
)
from tokenyard.cli.options import TrainOptions

SMALL = TrainOptions(hidden_size=32, layers=2, experts=4, top_k=2)


def test_a_byte_does_not_see_those_after_it() -> None:
    model = build_model(SMALL)
    torch.nn.init.normal_(model.head.weight)
    values = torch.randint(256, (1, 12))
    changed = values.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    with torch.no_grad():
        before, _ = model(values)
        after, _ = model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    query, key = torch.randn(2, 1, 1, 1, 32).expand(2, 1, 1, 10, 32)
    rotated_query, rotated_key = rotate(query), rotate(key)
    torch.testing.assert_close(rotated_query.norm(dim=-1), query.norm(dim=-1))
    scores = (rotated_query @ rotated_key.mT)[0, 0]
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.1


def test_weights_depend_on_the_seed_alone() -> None:
    first, second = build_model(SMALL), build_model(SMALL)
    other = build_model(replace(SMALL, seed=1))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_an_untrained_model_needs_eight_bits_per_byte() -> None:
    windows = torch.randint(256, (5, 17))
    assert evaluate(build_model(SMALL), windows, batch_size=2) == pytest.approx(8.0, abs=1e-5)


def test_evaluation_weighs_a_smaller_last_batch_by_its_size() -> None:
    model = build_model(SMALL)
    torch.nn.init.normal_(model.head.weight)
    windows = torch.randint(256, (5, 17))
    together = evaluate(model, windows, batch_size=5)
    assert evaluate(model, windows, batch_size=2) == pytest.approx(together, rel=1e-5)


def test_bits_per_byte_of_known_odds() -> None:
    logits = torch.zeros(1, 2, 256)
    logits[0, :, 7] = math.log(255)
    assert bits_per_byte(logits, torch.tensor([[7, 7]])).item() == pytest.approx(1.0, abs=1e-5)


def test_auxiliary_losses_reach_every_router() -> None:
    model = build_model(SMALL)
    _, statistics = model(torch.randint(256, (2, 16)))
    balance, z = auxiliary_losses(statistics)
    assert balance.item() >= 0.9
    (balance + z).backward()
    for block in model.blocks:
        assert block.moe.gate.weight.grad.abs().sum() > 0  # type: ignore[union-attr,operator]


def test_the_selection_bias_moves_against_the_load() -> None:
    model = build_model(replace(SMALL, selection_bias=0.5))
    with torch.no_grad():
        _, statistics = model(torch.randint(256, (2, 16)))
    update_selection_biases(model, [x.tokens_per_expert for x in statistics], 0.5)
    for block, of_layer in zip(model.blocks, statistics, strict=True):
        bias = block.moe.gate.e_score_correction_bias  # type: ignore[union-attr]
        loads = of_layer.tokens_per_expert
        assert bias[loads.argmin()] > bias[loads.argmax()]  # type: ignore[index]
    assert not any("correction" in name for name in build_model(SMALL).state_dict())


def test_generation_is_repeatable_and_follows_the_model() -> None:
    model = build_model(SMALL)
    prompt = torch.tensor([1, 2, 3])
    first = generate(model, prompt, 40, window=8, seed=5)
    assert first.shape == (40,)
    assert torch.equal(first, generate(model, prompt, 40, window=8, seed=5))
    assert not torch.equal(first, generate(model, prompt, 40, window=8, seed=6))
    torch.nn.init.normal_(model.head.weight)
    cold = generate(model, prompt, 5, window=8, seed=5, temperature=1e-6)
    with torch.no_grad():
        logits, _ = model(prompt[None])
    assert cold[0] == logits[0, -1].argmax()
