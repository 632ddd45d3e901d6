"""The errors a command reports in one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer

OUT_OF_MEMORY = "out of memory: lower --batch-size, --sequence-length or --hidden-size"


class CommandError(Exception):
    """Something the user can put right; the message is all they get to see."""


def describe_os_error(error: OSError) -> str:
    """The system's words for `error`, with the advice that helps on a full disk."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += "; free some space, then continue with --resume"
    return reason


@contextmanager
def writing(path: Path, consequence: str = "") -> Iterator[None]:
    """Turn an `OSError` while writing `path` into a `CommandError` that names the file."""
    try:
        yield
    except OSError as error:
        tail = f"; {consequence}" if consequence else ""
        raise CommandError(f"cannot write {path}: {describe_os_error(error)}{tail}") from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an expected failure as one line on stderr and exit with code 1, without a traceback."""
    try:
        yield
    except CommandError as error:
        message = str(error)
    except (torch.OutOfMemoryError, MemoryError):
        message = OUT_OF_MEMORY
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        message = OUT_OF_MEMORY
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = where + describe_os_error(error)
    else:
        return
    typer.echo("Error: " + " ".join(message.split()), err=True)
    raise typer.Exit(1)
