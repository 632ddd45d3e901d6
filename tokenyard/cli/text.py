"""The text a model is trained on, and how well a bigram model predicts it."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenyard.cli.errors import CommandError

BLOCK = 64 * 1024
HELD_OUT = 16
"""Of every block, the last 1/16 is for validation: spread over the text, yet never trained on."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
SKIPPED_TABLES = frozenset({"encodings", "__phello__"})
"""Generated tables, not prose: they would flatter any model."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    training: Tensor
    validation: Tensor
    description: str
    sha256: str
    cut_short: bool


def standard_library() -> list[Path]:
    """The Python standard library's own source files, in an order that does not vary."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = SKIPPED_FOLDERS | SKIPPED_TABLES
    found = [
        path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts[:-1])
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _named_files(names: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files.extend(_files_below(path))
        elif path.exists():
            files.append(path)
        else:
            raise CommandError(f"--text {name}: no such file or folder")
    return files


def _read(files: Sequence[Path], limit: int) -> tuple[bytes, int, bool]:
    """The files joined, at most `limit` bytes; also how many files, and whether more was left."""
    parts: list[bytes] = []
    room = limit
    for path in files:
        try:
            with path.open("rb") as file:
                data = file.read(room + 1)
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
        parts.append(data[:room])
        if len(data) > room:
            return b"".join(parts), len(parts), True
        room -= len(data)
    return b"".join(parts), len(parts), False


def _split(data: bytes) -> tuple[bytearray, bytearray]:
    training, validation = bytearray(), bytearray()
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        cut = len(block) - len(block) // HELD_OUT
        training += block[:cut]
        validation += block[cut:]
    return training, validation


def load_corpus(names: Sequence[str], limit: int, sequence_length: int) -> Corpus:
    """Read `names`, or the standard library when empty, and hold out a part for validation."""
    files = _named_files(names) if names else standard_library()
    data, num_files, cut_short = _read(files, limit)
    what = ", ".join(names) if names else "the Python standard library"
    if not data:
        raise CommandError(f"the text is empty: {what} holds no bytes")
    training, validation = _split(data)
    if len(training) <= sequence_length or len(validation) < 2:
        needed = max(-(-(sequence_length + 1) * HELD_OUT // (HELD_OUT - 1)) + 1, 2 * HELD_OUT)
        raise CommandError(
            f"the text is too short: {what} holds {len(data)} bytes, and --sequence-length "
            f"{sequence_length} needs about {needed}"
        )
    return Corpus(
        training=torch.frombuffer(training, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        description=f"{what} ({num_files} files, {len(data) / 1e6:.2f} MB)",
        sha256=hashlib.sha256(data).hexdigest(),
        cut_short=cut_short,
    )


def bigram_log2_probabilities(training: Tensor) -> Tensor:
    """`[256, 256]`: log2 of the next byte's probability (column) after a byte (row).

    Witten-Bell smoothing: a byte seen n times with d different successors trusts its own counts
    n / (n + d) and the byte frequencies (add-one smoothed) for the rest; nothing needs tuning.
    """
    values = training.long()
    pairs = torch.bincount(values[:-1] * 256 + values[1:], minlength=256 * 256)
    pairs = pairs.view(256, 256).double()
    single = torch.bincount(values, minlength=256).double() + 1
    single = single / single.sum()
    distinct = (pairs > 0).sum(1, keepdim=True).double().clamp(min=1)
    return ((pairs + distinct * single) / (pairs.sum(1, keepdim=True) + distinct)).log2()


def bigram_bits_per_byte(training: Tensor, windows: Tensor) -> float:
    """Bits per byte of the bigram model on all but the first byte of each window `[N, S+1]`."""
    table = bigram_log2_probabilities(training)
    values = windows.long()
    return -table[values[:, :-1], values[:, 1:]].mean().item()
