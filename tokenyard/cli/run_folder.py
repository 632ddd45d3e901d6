"""The folder that receives everything a training run writes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenyard.cli.checkpoint import Checkpoint, checkpoint_folders, load_newest
from tokenyard.cli.errors import CommandError, writing
from tokenyard.cli.options import TrainOptions, merge_with_run
from tokenyard.cli.text import Corpus


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def sample(self) -> Path:
        return self.root / "sample.txt"

    @property
    def loss_picture(self) -> Path:
        return self.root / "loss.png"

    @property
    def load_picture(self) -> Path:
        return self.root / "expert_load.png"

    @property
    def routing_picture(self) -> Path:
        return self.root / "routing.png"

    def holds_run(self) -> bool:
        return self.metrics.exists() or bool(checkpoint_folders(self.checkpoints))

    def create(self) -> None:
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove what a run writes, and nothing else that may be in the folder."""
        with writing(self.root):
            if self.checkpoints.exists():
                shutil.rmtree(self.checkpoints)
            for path in (
                self.metrics,
                self.report,
                self.sample,
                self.loss_picture,
                self.load_picture,
                self.routing_picture,
            ):
                path.unlink(missing_ok=True)


def start_or_resume(
    options: TrainOptions, explicit: frozenset[str], *, resume: bool, overwrite: bool
) -> tuple[TrainOptions, Checkpoint | None]:
    """The run's options and, with `resume`, the checkpoint to continue from; writes nothing."""
    folder = RunFolder(options.out)
    if resume and overwrite:
        raise CommandError("--resume and --overwrite contradict each other; give one of them")
    if resume:
        checkpoint = load_newest(folder.checkpoints)
        options = merge_with_run(options, explicit, checkpoint.run["options"])
        if options.steps < checkpoint.step:
            raise CommandError(
                f"--steps {options.steps} lies behind this run, which is at step {checkpoint.step}"
            )
        return options, checkpoint
    if folder.holds_run() and not overwrite:
        resumable = checkpoint_folders(folder.checkpoints)
        resuming = "continue it with --resume, " if resumable else ""
        raise CommandError(
            f"{folder.root} already holds a run; {resuming}replace it with --overwrite, "
            f"or choose another folder with --out"
        )
    return options, None


def same_text(corpus: Corpus, checkpoint: Checkpoint) -> None:
    """Refuse to continue a run on another text than it was started on."""
    if corpus.sha256 != checkpoint.run["text_sha256"]:
        raise CommandError(
            f"--resume: --text differs from this run's text: it was {checkpoint.run['text']} and "
            f"is {corpus.description} now, or the files have changed"
        )
