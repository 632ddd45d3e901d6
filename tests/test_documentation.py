"""The Python blocks of README.md and the documents run; what scripts have written is up to date.

The blocks of docs/routers.md are run by tests/nn/test_moe.py.
"""

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# section of docs/migrating.md -> module of tokenyard.compat
SECTIONS = {
    "TransformerEngine": "transformer_engine",
    "d9d": "d9d",
    "xtuner": "xtuner",
    "grouped_gemm": "grouped_gemm",
    "Megatron-Core": "megatron",
    "moe_ops": "moe_ops",
    "scattermoe": "scattermoe",
}


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/migrating.md", "docs/huggingface.md"])
def test_python_blocks_run(document: str) -> None:
    """In order, in one namespace."""
    found = blocks("python", read(document))
    assert found
    names: dict[str, Any] = {}
    for block in found:
        exec(block, names)


@pytest.mark.parametrize("section", SECTIONS)
def test_migration_names_every_function_and_a_line_that_works(section: str) -> None:
    module = f"tokenyard.compat.{SECTIONS[section]}"
    text = read("docs/migrating.md").split(f"\n## {section}\n")[1].split("\n## ")[0]
    missing = [n for n in importlib.import_module(module).__all__ if f"`{n}`" not in text]
    assert missing == []
    added = re.findall(r"^\+(.*)", "".join(blocks("diff", text)), re.MULTILINE)
    assert any(module in line for line in added)
    for line in added:
        exec(line, {})


def test_picture_is_as_its_script_draws_it() -> None:
    drawing = runpy.run_path(str(ROOT / "docs/dataflow.py"))["drawing"]
    assert read("docs/dataflow.svg") == drawing()


def test_table_of_experts_is_as_its_script_writes_it() -> None:
    document = runpy.run_path(str(ROOT / "docs/huggingface_table.py"))["document"]
    text = read("docs/huggingface.md")
    assert document(text) == text


def test_tables_of_scaling_are_as_their_script_writes_them() -> None:
    document = runpy.run_path(str(ROOT / "docs/scaling.py"))["document"]
    text = read("docs/scaling.md")
    assert document(text) == text
