"""One JSON line per step, appended as training goes."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tokenyard.cli.errors import CommandError, writing
from tokenyard.cli.files import replace_file


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    step: int
    bits_per_byte: float
    balance_loss: float
    z_loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    tokens_per_expert: list[list[int]]
    """Per layer, the tokens each expert served in this step."""
    validation_bits_per_byte: float | None = None

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert over the mean load, mean over layers; 1 is balanced."""
        ratios = [max(loads) * len(loads) / max(1, sum(loads)) for loads in self.tokens_per_expert]
        return sum(ratios) / len(ratios)


def read_metrics(path: Path, last_step: int) -> list[StepMetrics]:
    """The lines up to `last_step`; a half-written last line is dropped, any other is an error."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = StepMetrics(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise CommandError(f"{path}, line {number} is not a step's metrics: {error}") from error
        if record.step <= last_step:
            records.append(record)
    return records


class MetricsLog:
    """The metrics of a run, in memory and in a file that `records` replaces at the start."""

    def __init__(self, path: Path, records: list[StepMetrics]) -> None:
        self.path = path
        self.records = records
        with writing(path):
            replace_file(path, b"".join(_line(record) for record in records))
            self._file = path.open("ab")

    def append(self, record: StepMetrics) -> None:
        self.records.append(record)
        with writing(self.path, "the last checkpoint is intact"):
            self._file.write(_line(record))
            self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has every line."""
        with writing(self.path, "the last checkpoint is intact"):
            os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with writing(self.path, "the last checkpoint is intact"):
            self._file.close()


class UnwrittenLog(MetricsLog):
    """The metrics of a rank that writes nothing."""

    def __init__(self, records: list[StepMetrics]) -> None:
        self.records = records

    def append(self, record: StepMetrics) -> None:
        self.records.append(record)

    def sync(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def _line(record: StepMetrics) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n"
