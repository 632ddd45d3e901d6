"""What a finished run shows: a table, a sample of its writing, and pictures."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tokenyard.cli.errors import writing
from tokenyard.cli.files import replace_file
from tokenyard.cli.metrics import StepMetrics
from tokenyard.cli.model import ByteModel, evaluate, generate
from tokenyard.cli.options import TrainOptions
from tokenyard.cli.printable import as_text
from tokenyard.cli.run_folder import RunFolder
from tokenyard.cli.text import Corpus, bigram_bits_per_byte

PROMPT_BYTES = 64
SAMPLE_BYTES = 320
ROUTED_BYTES = 300
PASSAGES_TRIED = 64
UNIFORM_BITS = 8.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A trained model and everything needed to report on it; `first` on the rank that writes."""

    options: TrainOptions
    folder: RunFolder
    corpus: Corpus
    model: ByteModel
    validation: torch.Tensor
    records: list[StepMetrics]
    first: bool = True


def write_report(setup: Setup, console: Console) -> None:
    """Print the table and the sample, and write report, sample and pictures.

    All ranks run the model, since its experts are spread over them, and the first one writes.
    """
    options, folder = setup.options, setup.folder
    model_bits = evaluate(setup.model, setup.validation, options.batch_size)
    bigram_bits = bigram_bits_per_byte(setup.corpus.training, setup.validation.cpu())
    imbalance = final_imbalance(setup.records)
    summary: dict[str, Any] = {
        "steps": options.steps,
        "training_bytes": options.steps * options.batch_size * options.sequence_length,
        "validation_bits_per_byte": model_bits,
        "bigram_bits_per_byte": bigram_bits,
        "expert_imbalance": imbalance,
        "options": options.to_json(),
    }
    _write(setup, folder.report, json.dumps(summary, indent=2).encode() + b"\n")
    console.print(_table(summary))
    prompt, written = sample(setup)
    _write(setup, folder.sample, (as_text(prompt + written) + "\n").encode())
    _print_sample(console, prompt, written)
    passage, experts = routed_passage(setup)
    if not setup.first:
        return
    _write_pictures(setup, bigram_bits, passage, experts)
    names = ", ".join(sorted(path.name for path in folder.root.iterdir()))
    console.print(f"Written to {folder.root}: {names}", soft_wrap=True, markup=False)


def final_imbalance(records: list[StepMetrics]) -> float | None:
    """Load of the busiest expert over the mean load in the last tenth of the recorded steps."""
    last = records[-max(1, len(records) // 10) :]
    return sum(record.imbalance for record in last) / len(last) if last else None


def sample(setup: Setup) -> tuple[bytes, bytes]:
    """The first bytes of the validation text, and what the model writes behind them."""
    prompt = setup.validation[0, :PROMPT_BYTES]
    options = setup.options
    written = generate(
        setup.model, prompt, SAMPLE_BYTES, window=options.sequence_length, seed=options.seed
    )
    return bytes(prompt.tolist()), bytes(written.tolist())


def varied_passage(text: bytes) -> bytes:
    """The one with the most different bytes of some passages of `text` that begin a line."""
    step = max(1, len(text) // PASSAGES_TRIED)
    starts = [text.find(b"\n", at) + 1 for at in range(0, len(text), step)]
    passages = [text[start : start + ROUTED_BYTES] for start in starts]
    return max(passages, key=lambda passage: len(set(passage)))


@torch.no_grad()
def routed_passage(setup: Setup) -> tuple[bytes, list[list[int]]]:
    """A passage of the validation text and, per layer, each byte's first-choice expert."""
    passage = varied_passage(bytes(setup.corpus.validation.tolist()))
    values = torch.tensor([list(passage)], device=setup.validation.device)
    experts: list[list[int]] = []
    parts = [setup.model(part)[1] for part in values.split(setup.options.sequence_length, dim=1)]
    for layer in range(setup.options.layers):
        chosen = [part[layer].topk_indices[:, 0] for part in parts]
        experts.append(torch.cat(chosen).tolist())
    return passage, experts


def _write_pictures(
    setup: Setup, bigram_bits: float, passage: bytes, experts: list[list[int]]
) -> None:
    from tokenyard.cli import pictures  # matplotlib takes half a second to import

    folder = setup.folder
    if setup.records:
        _write(setup, folder.loss_picture, pictures.loss_picture(setup.records, bigram_bits))
        _write(setup, folder.load_picture, pictures.load_picture(setup.records))
    _write(
        setup,
        folder.routing_picture,
        pictures.routing_picture(passage, experts, setup.options.experts),
    )


def _write(setup: Setup, path: Path, data: bytes) -> None:
    if setup.first:
        with writing(path, "the trained model is in the last checkpoint"):
            replace_file(path, data)


def _table(summary: dict[str, Any]) -> Table:
    model_bits, bigram_bits = summary["validation_bits_per_byte"], summary["bigram_bits_per_byte"]
    table = Table(title="Validation text")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    table.add_column("against bigram", justify="right")
    table.add_row("uniform", f"{UNIFORM_BITS:.3f}", f"{UNIFORM_BITS / bigram_bits - 1:+.0%}")
    table.add_row("bigram", f"{bigram_bits:.3f}", "")
    table.add_row(
        f"MoE, {summary['steps']} steps",
        f"{model_bits:.3f}",
        f"{model_bits / bigram_bits - 1:+.0%}",
        style="bold",
    )
    if summary["expert_imbalance"] is not None:
        table.caption = f"expert load max/mean {summary['expert_imbalance']:.2f} (1 is balanced)"
    return table


def _print_sample(console: Console, prompt: bytes, written: bytes) -> None:
    text = Text(as_text(prompt), style="dim")
    text.append(as_text(written), style="not dim")
    console.print(Panel(text, title="The model continues the dimmed text", title_align="left"))
