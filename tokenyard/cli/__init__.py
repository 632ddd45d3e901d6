"""The `tokenyard` command; `main` says what to install where a library of its extra is missing."""

import sys
from importlib.util import find_spec

REQUIRED = ("typer", "rich", "safetensors", "matplotlib")


def main() -> None:
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        sys.exit(f"Error: needs {', '.join(missing)}: pip install 'tokenyard[cli]'")
    from tokenyard.cli.main import app

    app()
