"""Training a byte-level MoE language model, from options to a report."""

import math
import signal
import time
from dataclasses import dataclass
from functools import reduce

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

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
from tokenyard.cli.metrics import MetricsLog, StepMetrics, UnwrittenLog, read_metrics
from tokenyard.cli.model import (
    ByteModel,
    auxiliary_losses,
    bits_per_byte,
    build_model,
    evaluate,
    update_selection_biases,
)
from tokenyard.cli.options import TrainOptions, validate
from tokenyard.cli.progress import TrainingProgress
from tokenyard.cli.ranks import Ranks, join
from tokenyard.cli.report import Setup, write_report
from tokenyard.cli.run_folder import RunFolder, same_text, start_or_resume
from tokenyard.cli.shards import alike, whole
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
    ranks: Ranks
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
    with join(options) as ranks:
        console.quiet = not ranks.first
        stopped = _train(options, ranks, checkpoint, overwrite, console)
    if stopped is not None:
        raise typer.Exit(INTERRUPTED)


def _train(
    options: TrainOptions,
    ranks: Ranks,
    checkpoint: Checkpoint | None,
    overwrite: bool,
    console: Console,
) -> signal.Signals | None:
    """Up to the report, or to the signal that is returned."""
    corpus = load_corpus(options.text, options.text_limit * 10**6, options.sequence_length)
    if checkpoint is not None:
        same_text(corpus, checkpoint)
    training = start(options, corpus, ranks, checkpoint)
    if ranks.first:
        training.folder.create()
        if overwrite:
            training.folder.clear()
    _announce(console, training)
    with _open_log(training) as log:
        stopped = run_steps(training, log, console)
    if stopped is not None:
        return stopped
    setup = Setup(
        options=options,
        folder=training.folder,
        corpus=corpus,
        model=training.model,
        validation=training.validation,
        records=log.records,
        first=ranks.first,
    )
    write_report(setup, console)
    return None


def _open_log(training: Training) -> MetricsLog:
    if not training.ranks.first:
        return UnwrittenLog([])
    records = read_metrics(training.folder.metrics, training.step)
    return MetricsLog(training.folder.metrics, records)


def start(
    options: TrainOptions, corpus: Corpus, ranks: Ranks, checkpoint: Checkpoint | None
) -> Training:
    """Model, optimizer and text on this rank's device, as at the start or as in `checkpoint`."""
    model = build_model(options).to(ranks.device)
    ranks.spread(model)
    optimizer = torch.optim.AdamW(
        [{"params": parameters} for parameters in alike(model.parameters())],
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
        ranks=ranks,
        folder=RunFolder(options.out),
        corpus=corpus,
        model=model,
        optimizer=optimizer,
        training_text=corpus.training.to(ranks.device),
        validation=validation.to(ranks.device),
        step=checkpoint.step if checkpoint is not None else 0,
    )


def run_steps(training: Training, log: MetricsLog, console: Console) -> signal.Signals | None:
    """Take the remaining steps; on a signal to any rank, save and return after the step at hand."""
    options, ranks = training.options, training.ranks
    with (
        StopRequest() as stop,
        TrainingProgress(console, options.steps, training.step) as progress,
    ):
        while training.step < options.steps and ranks.agree(stop.signal) is None:
            metrics = take_step(training)
            log.append(metrics)
            progress.update(metrics)
            if training.step % options.checkpoint_every == 0:
                save(training, log)
        save(training, log)
    stopped = ranks.agree(stop.signal)
    if stopped is not None:
        console.print(
            f"Stopped by {stopped.name} after step {training.step} of {options.steps}; "
            f"the checkpoint is in {training.folder.checkpoints}. Continue with --resume.",
            soft_wrap=True,
            markup=False,
        )
    return stopped


def take_step(training: Training) -> StepMetrics:
    """One optimizer step on the batch of the next step number, of which every rank has a part."""
    options, ranks, started = training.options, training.ranks, time.perf_counter()
    step = training.step + 1
    batch = training_batch(
        training.training_text,
        seed=options.seed,
        step=step,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
    )
    mine = ranks.part(batch)
    logits, statistics = training.model(mine[:, :-1])
    loss = bits_per_byte(logits, mine[:, 1:])
    balance, z = auxiliary_losses(statistics)
    total = loss * math.log(2) + options.balance_loss * balance + options.z_loss * z
    training.optimizer.zero_grad()
    total.backward()
    ranks.average_gradients(training.model)
    norm = clip_gradients(training.optimizer)
    means = ranks.mean(torch.stack([loss, balance, z]))
    loss_value, balance_value, z_value, norm_value = torch.cat([means, norm[None]]).tolist()
    _finite(training, step, {"loss": loss_value, "gradient norm": norm_value, "z-loss": z_value})
    rate = learning_rate(step, options.steps, options.learning_rate)
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    training.optimizer.step()
    loads = ranks.total(torch.stack([of_layer.tokens_per_expert for of_layer in statistics]))
    if options.selection_bias:
        update_selection_biases(training.model, list(loads), options.selection_bias)
    training.step = step
    tokens_per_expert = loads.tolist()
    tokens_per_second = batch[:, 1:].numel() / (time.perf_counter() - started)
    return StepMetrics(
        step=step,
        bits_per_byte=loss_value,
        balance_loss=balance_value,
        z_loss=z_value,
        gradient_norm=norm_value,
        learning_rate=rate,
        tokens_per_second=tokens_per_second,
        tokens_per_expert=tokens_per_expert,
        validation_bits_per_byte=_validate_now_and_then(training),
    )


def clip_gradients(optimizer: torch.optim.Optimizer) -> Tensor:
    """The norm of all gradients, which are then at most GRADIENT_CLIP long together."""
    groups = [group["params"] for group in optimizer.param_groups]
    norms = [whole(get_total_norm([value.grad for value in group])) for group in groups]
    norm = reduce(torch.hypot, norms)
    for group in groups:
        clip_grads_with_norm_(group, GRADIENT_CLIP, norm)
    return norm


def save(training: Training, log: MetricsLog) -> None:
    """Write a checkpoint of the current step, its metrics first; refuse one that diverged."""
    norms = torch.stack([whole(value.detach().norm()) for value in training.model.parameters()])
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
    if training.ranks.first:
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


def _announce(console: Console, training: Training) -> None:
    corpus, options = training.corpus, training.options
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    console.print(f"Text: {corpus.description}", soft_wrap=True, markup=False)
    if corpus.cut_short:
        console.print(f"Only the first {options.text_limit} MB are read (--text-limit).")
    console.print(
        f"Model: {options.layers} layers, {options.experts} experts, top-{options.top_k}, "
        f"{parameters / 1e6:.2f} M parameters, on {training.ranks}"
    )
    if training.step == options.steps:
        console.print(f"All {options.steps} steps are done; --steps takes a larger number.")
    elif training.step:
        console.print(f"Continuing after step {training.step}.")
