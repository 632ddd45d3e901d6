"""`tokenyard check-model`: is a transformers model the same by Tokenyard, and how fast?"""

import torch
from rich.console import Console
from rich.table import Table

from tokenyard.cli.errors import CommandError
from tokenyard.integrations.model_check import Report, check_model, experts_in, model_of

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check(name: str, full: bool, num_tokens: int, device: torch.device, console: Console) -> None:
    """Print the table; CommandError if the model cannot be made, has no experts, or differs."""
    try:
        model = model_of(name, full).to(device)
    except Exception as error:  # what transformers raises for a file it cannot use has no one type
        reason = " ".join(str(error).split())[:200]
        raise CommandError(f"cannot make a model of {name}: {reason}") from error
    if not experts_in(model):
        raise CommandError(f"{type(model).__name__} has no experts that can be switched")
    report = check_model(model, num_tokens)
    console.print(table_of(report))
    size = "" if full else ", at tiny sizes"
    console.print(f"output of {type(model).__name__}{size} differs by {report.output:.1e}")
    limit = LIMITS.get(model.dtype, 1e-4)
    worst = max(report.output, *(max(x.difference, x.gradient) for x in report.layers))
    if not worst < limit:
        raise CommandError(f"differs by {worst:.1e}, {limit:.0e} is allowed for {model.dtype}")


def table_of(report: Report) -> Table:
    """Relative differences, and milliseconds of the forward."""
    kinds = ", ".join(sorted({layer.kind for layer in report.layers}))
    table = Table(title=f"{kinds}: eager beside tokenyard, forward in ms")
    for title in ("layer", "by"):
        table.add_column(title, overflow="fold")
    for title in ("output", "gradient", "eager", "grouped_mm", "tokenyard"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in report.layers:
        how = layer.activation or "own gate"
        times = ("-" if t is None else f"{t:.2f}" for t in layer.milliseconds.values())
        name = layer.name.removeprefix("model.").removesuffix(".experts")
        table.add_row(name, how, f"{layer.difference:.1e}", f"{layer.gradient:.1e}", *times)
    return table
