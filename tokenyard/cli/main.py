"""The `tokenyard` command line: `train`, `tune`, `check-model` and `env`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tokenyard.cli.environment import print_environment
from tokenyard.cli.errors import CommandError, one_line_errors
from tokenyard.cli.options import TrainOptions, choose_device
from tokenyard.cli.train import train

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,
    help="Mixture-of-Experts operators for PyTorch.",
)
DEFAULT = TrainOptions()
LARGEST_SEED = 2**63 - 1


@app.command("train")
def train_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for everything the run writes.")] = DEFAULT.out,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="File or folder to train on, any bytes; repeatable. "
            "Default: the Python standard library's source.",
            show_default=False,
        ),
    ] = None,
    text_limit: Annotated[
        int, typer.Option(min=1, help="Read at most this many MB of text.")
    ] = DEFAULT.text_limit,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Length of the run. With --resume it may grow: the learning rate "
            "then follows the longer schedule from there on.",
        ),
    ] = DEFAULT.steps,
    experts: Annotated[int, typer.Option(min=1, help="Experts per layer.")] = DEFAULT.experts,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per byte.")] = DEFAULT.top_k,
    hidden_size: Annotated[
        int, typer.Option(min=32, help="Width of the model, a multiple of 32.")
    ] = DEFAULT.hidden_size,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = DEFAULT.layers,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences per step.")
    ] = DEFAULT.batch_size,
    sequence_length: Annotated[
        int, typer.Option(min=2, help="Bytes per sequence.")
    ] = DEFAULT.sequence_length,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Peak: warm-up over 5% of the steps, then towards zero.")
    ] = DEFAULT.learning_rate,
    balance_loss: Annotated[
        float, typer.Option(min=0.0, help="Weight of the load-balance loss; 0 turns it off.")
    ] = DEFAULT.balance_loss,
    z_loss: Annotated[
        float, typer.Option(min=0.0, help="Weight of the router's z-loss; 0 turns it off.")
    ] = DEFAULT.z_loss,
    selection_bias: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Rate at which a bias on the choice of experts moves towards balance each step, "
            "for instance 0.001; 0 turns it off.",
        ),
    ] = DEFAULT.selection_bias,
    seed: Annotated[
        int,
        typer.Option(min=0, max=LARGEST_SEED, help="Of the weights, the batches and the sample."),
    ] = DEFAULT.seed,
    device: Annotated[
        str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    ] = DEFAULT.device,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that share the experts, of those that torchrun starts: "
            "torchrun --nproc-per-node 2 -m tokenyard.cli train --ep 2.",
        ),
    ] = DEFAULT.ep,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.")
    ] = DEFAULT.checkpoint_every,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out from its newest checkpoint; "
            "options not given are taken from that run.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in --out.")
    ] = False,
) -> None:
    """Train a byte-level MoE language model on real text.

    Shows loss, speed and expert balance, and ends with validation bits per byte beside those of a
    bigram model, a sample, and pictures of the loss, the expert load and the routing. Ctrl-C stops
    after the current step with a checkpoint; --resume continues from there, on the CPU to the very
    same numbers.
    """
    options = TrainOptions(
        out=out,
        text=tuple(text or ()),
        text_limit=text_limit,
        steps=steps,
        experts=experts,
        top_k=top_k,
        hidden_size=hidden_size,
        layers=layers,
        batch_size=batch_size,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        balance_loss=balance_loss,
        z_loss=z_loss,
        selection_bias=selection_bias,
        seed=seed,
        device=device,
        ep=ep,
        checkpoint_every=checkpoint_every,
    )
    with one_line_errors():
        train(options, _typed(context), resume=resume, overwrite=overwrite, console=Console())


def _typed(context: typer.Context) -> frozenset[str]:
    """The parameters given on the command line, as opposed to those left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        name for name, source in sources.items() if source and source.name != "DEFAULT"
    )


@app.command("tune")
def tune_command(
    hidden_size: Annotated[int, typer.Option(min=1, help="H of the model.")],
    intermediate_size: Annotated[int, typer.Option(min=1, help="I, the width of an expert.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts on this GPU.")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...")] = "cuda",
) -> None:
    """Find the fastest tiles of grouped_gemm for a model's sizes on this GPU, and keep them.

    Takes some minutes. The tiles go to tiles.json in the cache folder ($TOKENYARD_CACHE, by default
    ~/.cache/tokenyard), from where every later process takes them. No result changes but by rounding.
    """
    with one_line_errors():
        if find_spec("triton") is None:
            raise CommandError("needs Triton: pip install 'tokenyard[triton]'")
        from tokenyard.cli.tune import DTYPES, tune

        if dtype not in DTYPES:
            raise CommandError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype}")
        chosen, console = choose_device(device), Console()
        if chosen.type != "cuda":
            raise CommandError(f"--device must be a GPU, not {device}")
        path = tune(hidden_size, intermediate_size, experts, dtype, chosen, console)
        console.print(f"wrote {path}", soft_wrap=True)


@app.command("check-model")
def check_model_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_PATH",
            help="A folder, a config.json, a model type such as qwen3_moe, or a name on the Hub.",
        ),
    ],
    full: Annotated[
        bool,
        typer.Option("--full", help="Load the model itself, not a tiny one of its config."),
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Random tokens to run.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Compare a transformers model's experts, eager and by Tokenyard, layer by layer.

    By default a tiny model with the config's choices and random weights: works offline and takes seconds.
    Exits with 1 if outputs or gradients differ by more than rounding.
    """
    with one_line_errors():
        if find_spec("transformers") is None:
            raise CommandError("needs transformers: pip install 'tokenyard[hf]'")
        from tokenyard.cli.check_model import check

        check(name, full, tokens, choose_device(device), Console())


@app.command("env")
def env_command() -> None:
    """Show the versions of Python, PyTorch and Triton, the device, and the backend in use."""
    print_environment(Console())
