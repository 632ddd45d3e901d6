"""Checkpoints are complete or absent, and come back as they were written."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tokenyard.cli.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    load_newest,
    model_tensors,
    optimizer_tensors,
    restore,
    save_checkpoint,
)
from tokenyard.cli.errors import CommandError


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def checkpoint_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoint:
    return Checkpoint(
        step=step,
        run={"options": {"seed": 3}},
        model=model_tensors(model),
        optimizer=optimizer_tensors(model, optimizer),
    )


def test_restored_training_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    model, optimizer = trained(seed=0)
    save_checkpoint(tmp_path, checkpoint_of(2, model, optimizer))
    other, other_optimizer = trained(seed=1, steps=0)
    loaded = load_newest(tmp_path)
    assert (loaded.step, loaded.run) == (2, {"options": {"seed": 3}})
    restore(loaded, other, other_optimizer)
    x = torch.randn(5, 3)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        one(x).square().sum().backward()
        its_optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_saved_tensors_are_copies() -> None:
    model, _ = trained(seed=0)
    saved = model_tensors(model)["0.weight"]
    before = saved.clone()
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[index,union-attr]
    assert torch.equal(saved, before)


def test_the_newest_two_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    model, optimizer = trained(seed=0)
    (tmp_path / "partial-abandoned").mkdir()
    for step in (1, 2, 100_000_000):
        save_checkpoint(tmp_path, checkpoint_of(step, model, optimizer))
    names = ["step-00000002", "step-100000000"]
    assert [path.name for path in checkpoint_folders(tmp_path)] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert load_newest(tmp_path).step == 100_000_000


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    model, optimizer = trained(seed=0)
    folder = save_checkpoint(tmp_path, checkpoint_of(1, model, optimizer))
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "run.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "run.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, damage: str) -> None:
    model, optimizer = trained(seed=0)
    folder = save_checkpoint(tmp_path, checkpoint_of(1, model, optimizer))
    if damage == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:-5])
    else:
        (folder / name).unlink()
    with pytest.raises(CommandError, match=r"cannot read .*step-00000001"):
        load_newest(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(seed=0)
    checkpoint = checkpoint_of(1, model, optimizer)
    other = nn.Linear(3, 4)
    with pytest.raises(CommandError, match="does not fit this model"):
        restore(checkpoint, other, torch.optim.AdamW(other.parameters()))


@pytest.mark.parametrize("damage", ["empty", "renamed", "shorter", "another dtype"])
def test_an_optimizer_that_does_not_fit_is_refused(damage: str) -> None:
    model, optimizer = trained(seed=0)
    checkpoint = checkpoint_of(2, model, optimizer)
    state = checkpoint.optimizer
    if damage == "empty":
        state.clear()
    elif damage == "renamed":
        state["0.weight.moment"] = state.pop("0.weight.exp_avg")
    elif damage == "shorter":
        state["0.weight.exp_avg"] = state["0.weight.exp_avg"][:1]
    else:
        state["0.weight.exp_avg"] = state["0.weight.exp_avg"].double()
    with pytest.raises(CommandError, match=r"optimizer does not fit this model: \d\.\w+\.\w+"):
        restore(checkpoint, *trained(seed=1, steps=0))


def test_a_damaged_checkpoint_comes_with_advice_that_works(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, checkpoint_of(step, *trained(seed=0, steps=step)))
    newest, before = (tmp_path / f"step-{step:08d}" for step in (2, 1))
    (newest / "run.json").write_text("[]")
    with pytest.raises(
        CommandError, match=rf"does not describe a checkpoint; remove .*{before.name}"
    ):
        load_newest(tmp_path)
    shutil.rmtree(before)
    with pytest.raises(CommandError, match="start again with --overwrite"):
        load_newest(tmp_path)
