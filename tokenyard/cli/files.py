"""Writing files so that a crash or a full disk leaves the old content, never half of the new."""

import os
from pathlib import Path


def write_through(path: Path, data: bytes) -> None:
    """Write `data` to `path` and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable; only POSIX systems can, and need to."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write_through(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
