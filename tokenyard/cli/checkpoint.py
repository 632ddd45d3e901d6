"""Checkpoints: a folder per step with safetensors and JSON, complete or absent.

A checkpoint is written under a temporary name and renamed last, so a folder called `step-...` is
always whole, whatever interrupted its writing.

    checkpoints/step-00000100/model.safetensors
    checkpoints/step-00000100/optimizer.safetensors
    checkpoints/step-00000100/run.json
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from tokenyard.cli.errors import CommandError, writing
from tokenyard.cli.files import sync_folder, write_through
from tokenyard.cli.shards import placed_like, whole

FORMAT = 1
KEPT = 2
"""The newest, and the one before it should the newest turn out unreadable."""

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = "partial-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    run: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def checkpoint_folders(parent: Path) -> list[Path]:
    """The complete checkpoints below `parent`, oldest first."""
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def save_checkpoint(parent: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` below `parent` unless it is there, and drop all but the newest."""
    final = parent / f"step-{checkpoint.step:08d}"
    if final.exists():
        return final
    older = checkpoint_folders(parent)
    consequence = f"{older[-1]} is intact" if older else "no checkpoint was written before"
    with writing(final, consequence):
        _write_folder(final, checkpoint)
    for stale in checkpoint_folders(parent)[:-KEPT]:
        shutil.rmtree(stale, ignore_errors=True)
    return final


def _write_folder(final: Path, checkpoint: Checkpoint) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in final.parent.glob(_PARTIAL + "*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = final.with_name(_PARTIAL + final.name)
    try:
        partial.mkdir()
        state = {"format": FORMAT, "step": checkpoint.step, "torch": torch.__version__}
        write_through(partial / "model.safetensors", safetensors.save(checkpoint.model))
        write_through(partial / "optimizer.safetensors", safetensors.save(checkpoint.optimizer))
        text = json.dumps(state | {"run": checkpoint.run}, indent=2) + "\n"
        write_through(partial / "run.json", text.encode())
        sync_folder(partial)
        os.replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(final.parent)


def load_newest(parent: Path) -> Checkpoint:
    """The newest checkpoint below `parent`, its tensors on the CPU."""
    folders = checkpoint_folders(parent)
    if not folders:
        raise CommandError(f"--resume: no checkpoint in {parent}; start the run without --resume")
    folder = folders[-1]
    try:
        state = json.loads((folder / "run.json").read_text())
        if not isinstance(state, dict):
            raise ValueError("run.json does not describe a checkpoint")
        if state["format"] != FORMAT:
            raise CommandError(
                f"{folder} has format {state['format']}, this version reads {FORMAT}"
            )
        return Checkpoint(
            step=int(state["step"]),
            run=dict(state["run"]),
            model=safetensors.load_file(folder / "model.safetensors"),
            optimizer=safetensors.load_file(folder / "optimizer.safetensors"),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        advice = "start again with --overwrite"
        if len(folders) > 1:
            advice = f"remove that folder to resume from {folders[-2]}"
        raise CommandError(f"cannot read {folder}: {error}; {advice}") from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers, copied so that later steps cannot change them."""
    return {name: _detached(value) for name, value in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state as `<parameter>.<entry>`: `exp_avg`, `exp_avg_sq` and `step`."""
    return {
        f"{name}.{entry}": _detached(value)
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's tensors back, of sharded parameters this process's shards."""
    held = model.state_dict()
    placed = {name: placed_like(value, held.get(name)) for name, value in checkpoint.model.items()}
    try:
        model.load_state_dict(placed)
    except RuntimeError as error:
        raise CommandError(f"the checkpoint does not fit this model: {error}") from error
    expected = {
        f"{name}.{entry}": like
        for name, parameter in model.named_parameters()
        for entry, like in (
            ("exp_avg", parameter),
            ("exp_avg_sq", parameter),
            ("step", torch.zeros(())),
        )
    }
    saved = checkpoint.optimizer
    wrong = saved.keys() ^ (expected.keys() if checkpoint.step else {})
    wrong |= {
        key
        for key in saved.keys() & expected.keys()
        if (saved[key].shape, saved[key].dtype) != (expected[key].shape, expected[key].dtype)
    }
    if wrong:
        raise CommandError(f"the checkpoint's optimizer does not fit this model: {min(wrong)}")
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_index = {
        index: {
            "exp_avg": placed_like(saved[f"{names[parameter]}.exp_avg"], parameter),
            "exp_avg_sq": placed_like(saved[f"{names[parameter]}.exp_avg_sq"], parameter),
            "step": saved[f"{names[parameter]}.step"],
        }
        for index, parameter in enumerate(parameters)
        if saved
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _detached(value: Tensor) -> Tensor:
    return whole(value.detach()).to("cpu", copy=True).contiguous()
