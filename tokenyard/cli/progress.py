"""How training looks while it goes: a bar on a terminal, a line now and then in a log."""

from collections import deque
from statistics import mean, median
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokenyard.cli.metrics import StepMetrics

LINES_IN_A_LOG = 10
RECENT = 20
"""Steps behind each shown number, which calms it enough to read."""


class TrainingProgress:
    """Shows loss, speed and expert balance of the run; `done` steps are behind it already."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        self._console = console
        self._steps = steps
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)

    def update(self, metrics: StepMetrics) -> None:
        self._recent.append(metrics)
        loss = mean(recent.bits_per_byte for recent in self._recent)
        speed = median(recent.tokens_per_second for recent in self._recent)
        balance = mean(recent.imbalance for recent in self._recent)
        text = f"{loss:.2f} bits/byte  {speed:,.0f} tokens/s  expert load max/mean {balance:.2f}"
        self._bar.update(self._task, completed=metrics.step, description=text)
        every = max(1, self._steps // LINES_IN_A_LOG)
        if not self._console.is_terminal and metrics.step % every == 0:
            self._console.print(f"step {metrics.step}/{self._steps}  {text}", soft_wrap=True)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
