"""Training a byte-level MoE language model, from options to a report."""

import math
import time
from dataclasses import dataclass

import torch
import typer
from rich.console import Console
from torch import Tensor

from tokenyard.cli.batches import training_batch, validation_windows
from tokenyard.cli.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    model_tensors,
    optimizer_tensors,
    restore,
    save_checkpoint,
)
from tokenyard.cli.errors import CommandError
from tokenyard.cli.interrupts import StopRequest
from tokenyard.cli.metrics import MetricsLog, StepMetrics, read_metrics
from tokenyard.cli.model import (
    ByteModel,
    auxiliary_losses,
    bits_per_byte,
    build_model,
    evaluate,
    update_selection_biases,
)
from tokenyard.cli.options import TrainOptions, choose_device, validate
from tokenyard.cli.progress import TrainingProgress
from tokenyard.cli.report import Setup, write_report
from tokenyard.cli.run_folder import RunFolder, same_text, start_or_resume
from tokenyard.cli.text import Corpus, load_corpus

WARMUP = 0.05
GRADIENT_CLIP = 1.0
VALIDATIONS = 10
INTERRUPTED = 130
"""Exit code of a program stopped by Ctrl-C."""


@dataclass(kw_only=True)
class Training:
    """A run in progress: `step` counts the steps taken."""

    options: TrainOptions
    folder: RunFolder
    corpus: Corpus
    model: ByteModel
    optimizer: torch.optim.AdamW
    training_text: Tensor
    validation: Tensor
    step: int = 0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth of `steps`, then linear towards zero at the end."""
    warmup = max(1, round(steps * WARMUP))
    if step <= warmup:
        return peak * step / warmup
    return peak * (steps - step + 1) / (steps - warmup + 1)


def train(
    options: TrainOptions,
    explicit: frozenset[str],
    *,
    resume: bool,
    overwrite: bool,
    console: Console,
) -> None:
    """Run `tokenyard train`; `explicit` names the options that the user typed."""
    options, checkpoint = start_or_resume(options, explicit, resume=resume, overwrite=overwrite)
    validate(options)
    device = choose_device(options.device)
    corpus = load_corpus(options.text, options.text_limit * 10**6, options.sequence_length)
    if checkpoint is not None:
        same_text(corpus, checkpoint)
    training = start(options, corpus, device, checkpoint)
    training.folder.create()
    if overwrite:
        training.folder.clear()
    _announce(console, training, device)
    records = read_metrics(training.folder.metrics, training.step)
    with MetricsLog(training.folder.metrics, records) as log:
        run_steps(training, log, console)
    setup = Setup(
        options=options,
        folder=training.folder,
        corpus=corpus,
        model=training.model,
        validation=training.validation,
        records=log.records,
    )
    write_report(setup, console)


def start(
    options: TrainOptions, corpus: Corpus, device: torch.device, checkpoint: Checkpoint | None
) -> Training:
    """Model, optimizer and text on `device`, as at the start or as in `checkpoint`."""
    model = build_model(options).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        fused=True,
    )
    if checkpoint is not None:
        restore(checkpoint, model, optimizer)
    validation = validation_windows(corpus.validation, options.sequence_length)
    return Training(
        options=options,
        folder=RunFolder(options.out),
        corpus=corpus,
        model=model,
        optimizer=optimizer,
        training_text=corpus.training.to(device),
        validation=validation.to(device),
        step=checkpoint.step if checkpoint is not None else 0,
    )


def run_steps(training: Training, log: MetricsLog, console: Console) -> None:
    """Take the remaining steps; on a signal, save and exit after the step at hand."""
    options = training.options
    with (
        StopRequest() as stop,
        TrainingProgress(console, options.steps, training.step) as progress,
    ):
        while training.step < options.steps and stop.signal is None:
            metrics = take_step(training)
            log.append(metrics)
            progress.update(metrics)
            if training.step % options.checkpoint_every == 0:
                save(training, log)
        save(training, log)
    if stop.signal is not None:
        console.print(
            f"Stopped by {stop.signal.name} after step {training.step} of {options.steps}; "
            f"the checkpoint is in {training.folder.checkpoints}. Continue with --resume.",
            soft_wrap=True,
            markup=False,
        )
        raise typer.Exit(INTERRUPTED)


def take_step(training: Training) -> StepMetrics:
    """One optimizer step on the batch of the next step number."""
    options, started = training.options, time.perf_counter()
    step = training.step + 1
    batch = training_batch(
        training.training_text,
        seed=options.seed,
        step=step,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
    )
    logits, statistics = training.model(batch[:, :-1])
    loss = bits_per_byte(logits, batch[:, 1:])
    balance, z = auxiliary_losses(statistics)
    total = loss * math.log(2) + options.balance_loss * balance + options.z_loss * z
    training.optimizer.zero_grad()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), GRADIENT_CLIP)
    loss_value, balance_value, z_value, norm_value = torch.stack([loss, balance, z, norm]).tolist()
    _finite(training, step, {"loss": loss_value, "gradient norm": norm_value, "z-loss": z_value})
    rate = learning_rate(step, options.steps, options.learning_rate)
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    training.optimizer.step()
    if options.selection_bias:
        update_selection_biases(training.model, statistics, options.selection_bias)
    training.step = step
    loads = torch.stack([of_layer.tokens_per_expert for of_layer in statistics]).tolist()
    tokens_per_second = batch[:, 1:].numel() / (time.perf_counter() - started)
    return StepMetrics(
        step=step,
        bits_per_byte=loss_value,
        balance_loss=balance_value,
        z_loss=z_value,
        gradient_norm=norm_value,
        learning_rate=rate,
        tokens_per_second=tokens_per_second,
        tokens_per_expert=loads,
        validation_bits_per_byte=_validate_now_and_then(training),
    )


def save(training: Training, log: MetricsLog) -> None:
    """Write a checkpoint of the current step, its metrics first; refuse one that diverged."""
    norms = torch.stack([value.detach().norm() for value in training.model.parameters()])
    _finite(training, training.step, {"norm of the parameters": float(norms.norm())})
    log.sync()
    run = {
        "options": training.options.to_json(),
        "text": training.corpus.description,
        "text_sha256": training.corpus.sha256,
    }
    checkpoint = Checkpoint(
        step=training.step,
        run=run,
        model=model_tensors(training.model),
        optimizer=optimizer_tensors(training.model, training.optimizer),
    )
    save_checkpoint(training.folder.checkpoints, checkpoint)


def _validate_now_and_then(training: Training) -> float | None:
    options = training.options
    if training.step % max(1, options.steps // VALIDATIONS):
        return None
    return evaluate(training.model, training.validation, options.batch_size)


def _finite(training: Training, step: int, values: dict[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            kept = checkpoint_folders(training.folder.checkpoints)
            where = f"{kept[-1]} is kept" if kept else "no checkpoint had been written yet"
            raise CommandError(
                f"the {name} became {value} in step {step}; {where}; "
                f"a lower --learning-rate may help"
            )


def _announce(console: Console, training: Training, device: torch.device) -> None:
    corpus, options = training.corpus, training.options
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    console.print(f"Text: {corpus.description}", soft_wrap=True, markup=False)
    if corpus.cut_short:
        console.print(f"Only the first {options.text_limit} MB are read (--text-limit).")
    console.print(
        f"Model: {options.layers} layers, {options.experts} experts, top-{options.top_k}, "
        f"{parameters / 1e6:.2f} M parameters, on {device}"
    )
    if training.step == options.steps:
        console.print(f"All {options.steps} steps are done; --steps takes a larger number.")
    elif training.step:
        console.print(f"Continuing after step {training.step}.")
