"""The table of docs/huggingface.md: every experts class of the installed transformers, and how it runs.

python docs/huggingface_table.py    write it into the document
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "huggingface.md"
START, END = "<!-- table -->\n", "<!-- end of table -->\n"
sys.path.insert(0, str(ROOT / "tests"))

from integrations import tiny  # noqa: E402

from tokenyard.integrations.transformers import known_activation  # noqa: E402


def row(module: str, name: str) -> str:
    experts: Any = tiny.experts_of(module, name)
    kind = known_activation(experts)
    how = f"fused, `{kind}`" if kind else "in steps, around its own gate"
    if getattr(experts, "has_post_expert_norm", False):
        how += " and norm"
    weights = "[E,in,out]" if experts.is_transposed else "[E,out,in]"
    notes = [
        note
        for note, present in (("bias", experts.has_bias), ("no gate", not experts.has_gate))
        if present
    ]
    whole = "" if tiny.has_language_model(module) else "alone"
    return (
        f"| {module.split('.')[-2]} | `{name}` | {how} | {', '.join([weights, *notes])} | {whole} |"
    )


def table() -> str:
    head = "| model | class | how it runs | weights | tested |\n|---|---|---|---|---|\n"
    return head + "".join(row(*found) + "\n" for found in tiny.decorated())


def document(text: str) -> str:
    before, rest = text.split(START)
    return before + START + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
