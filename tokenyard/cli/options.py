"""The options of `tokenyard train`, their checks, and what a resumed run may change."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.cli.errors import CommandError

HEAD_SIZE = 32
"""Width of an attention head; `hidden_size` is a multiple of it."""

PER_INVOCATION = frozenset({"out", "device", "ep", "checkpoint_every"})
"""Options that say how to run, not what: they are not kept with the run."""

CHANGEABLE = frozenset({"steps", "text"})
"""Kept with the run, but free to differ on `--resume`; the text's content is compared instead."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    out: Path = Path("runs/demo")
    text: tuple[str, ...] = ()
    text_limit: int = 64
    steps: int = 1000
    experts: int = 8
    top_k: int = 2
    hidden_size: int = 128
    layers: int = 3
    batch_size: int = 8
    sequence_length: int = 128
    learning_rate: float = 4e-3
    balance_loss: float = 0.01
    z_loss: float = 0.001
    selection_bias: float = 0.0
    seed: int = 0
    device: str = "auto"
    ep: int = 1
    checkpoint_every: int = 100

    def to_json(self) -> dict[str, Any]:
        """The options that define the run, as stored in its checkpoints."""
        kept = {name: value for name, value in asdict(self).items() if name not in PER_INVOCATION}
        return kept | {"text": list(self.text)}


def flag(name: str) -> str:
    """`top_k` as the user types it: `--top-k`."""
    return "--" + name.replace("_", "-")


def validate(options: TrainOptions) -> None:
    """Reject combinations that no single option's range can rule out."""
    if options.top_k > options.experts:
        raise CommandError(
            f"--top-k {options.top_k} needs at least as many experts, "
            f"got --experts {options.experts}"
        )
    for name, value in asdict(options).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CommandError(f"{flag(name)} must be finite, got {value}")
    if options.hidden_size % HEAD_SIZE:
        raise CommandError(
            f"--hidden-size must be a multiple of {HEAD_SIZE} (the width of an attention head), "
            f"got {options.hidden_size}"
        )


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is the GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CommandError(f"--device {name} cannot be used: {reason}") from error
    return device


def merge_with_run(
    given: TrainOptions, explicit: frozenset[str], stored: dict[str, Any]
) -> TrainOptions:
    """Options of a resumed run: the run's own, and typed ones where they agree with it."""
    kept = {field.name for field in fields(given)} - PER_INVOCATION
    missing = sorted(kept - stored.keys())
    if missing:
        raise CommandError(f"the checkpoint does not record {flag(missing[0])}; use --overwrite")
    adopted: dict[str, Any] = {}
    for name in sorted(kept):
        was = tuple(stored[name]) if name == "text" else stored[name]
        now = getattr(given, name)
        if type(was) is not type(now):
            raise CommandError(
                f"the checkpoint's {flag(name)} is {was!r}, not of type {type(now).__name__}; "
                f"use --overwrite"
            )
        if name not in explicit:
            adopted[name] = was
        elif name not in CHANGEABLE and was != now:
            raise CommandError(
                f"--resume: {flag(name)} was {was} in this run and is {now} now; "
                f"leave it out, or start another run with --out"
            )
    return replace(given, **adopted)
