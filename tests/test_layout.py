"""Who may import whom, and what no file of the package may contain."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 450

# layer -> the layers it may import
CORE = frozenset({"check", "backend", "registration", "routing", "conventions"})
BASE = CORE - {"conventions"}
ALLOWED: dict[str, frozenset[str]] = {
    "check": frozenset(),
    "backend": frozenset({"check"}),
    "registration": frozenset({"check", "backend"}),
    "routing": frozenset({"check", "backend", "registration", "routing"}),
    "conventions": frozenset({"check", "routing", "conventions"}),
    "ops.rows": BASE,
    "ops": BASE | {"ops.rows", "ops"},
    "kernels": frozenset({"kernels"}),
    "package": CORE | {"ops", "ops.rows", "nn"},
    "nn": CORE | {"package", "ops", "ops.rows", "nn"},
}
for _layer in ("parallel", "integrations", "compat"):
    ALLOWED[_layer] = ALLOWED["nn"] | {_layer}
# transformers' expert parallelism is exchanged by ours
ALLOWED["integrations"] |= {"parallel"}
# cli reaches kernels to tune their tiles
ALLOWED["cli"] = ALLOWED["nn"] | {"parallel", "integrations", "compat", "cli", "kernels"}

# third party -> the only layers that may import it; None means every layer
THIRD_PARTY: dict[str, frozenset[str] | None] = {
    "torch": None,
    "typing_extensions": None,  # torch depends on it
    "triton": frozenset({"kernels"}),
    "transformers": frozenset({"integrations"}),
    "torchtitan": frozenset({"integrations"}),
    "typer": frozenset({"cli"}),
    "rich": frozenset({"cli"}),
    "matplotlib": frozenset({"cli"}),
    "safetensors": frozenset({"cli"}),
    "numpy": frozenset({"cli"}),
}


OPERATORS = {
    *("activation", "expert_mlp", "grouped_gemm", "permute", "permute_slots", "router_logits"),
    *("sort_chunks", "topk", "unpermute"),
}


KERNEL_TOOLS = {
    f"tokenyard.kernels.{name}" for name in ("groups", "hopper_gemm", "launch", "tiles")
}


class Import(NamedTuple):
    line: int
    module: str
    name: str | None  # None: the module itself is bound


def module_of(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer of a module of ours: `tokenyard.ops.rows` -> `ops.rows`."""
    parts = module.split(".")[1:]
    if parts[:2] == ["ops", "rows"]:
        return "ops.rows"
    return parts[0] if parts else "package"


def imports(path: str, tree: ast.AST, modules: set[str]) -> Iterator[Import]:
    """Every import in a file, wherever it stands; of submodules too, in `from a import b`."""
    package = module_of(path)
    if not path.endswith("__init__.py"):
        package = package.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                if submodule in modules:
                    yield Import(node.lineno, submodule, None)
                else:
                    yield Import(node.lineno, base, alias.name)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            match node.args:
                case [ast.Constant(value=str(target)), *_]:
                    yield Import(node.lineno, target, None)
                case _:
                    yield Import(node.lineno, "<computed>", None)


def called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def shared_between_ops(name: str) -> bool:
    """Names that one operator may take from another: definitions, checks, types; no operator."""
    return not name.startswith("_") and name not in OPERATORS


def import_fault(path: str, found: Import) -> str | None:
    """Why this import breaks the rules, or None."""
    me, layer = module_of(path), layer_of(module_of(path))
    root = found.module.split(".")[0]
    if found.module == "<computed>":
        return None if layer == "backend" else "only backend imports a module by a computed name"
    if root in sys.stdlib_module_names:
        return None
    if root != "tokenyard":
        where = THIRD_PARTY.get(root, frozenset())
        return None if where is None or layer in where else f"{layer} may not import {root}"
    target = layer_of(found.module)
    if target not in ALLOWED[layer]:
        return f"{layer} may not import {found.module}"
    if layer == "kernels":
        shared = found.module.startswith("tokenyard.kernels.device")
        if not shared and found.module not in KERNEL_TOOLS:
            return f"kernels may not import {found.module}, another kernel"
    if layer == target == "ops" and me != "tokenyard.ops":
        if found.name is None:
            return f"an operator may not import the module {found.module}"
        if found.module == "tokenyard.ops" or not shared_between_ops(found.name):
            return (
                f"an operator may take definitions, checks and types from another, not {found.name}"
            )
    return None


def caught(handler: ast.ExceptHandler) -> set[str]:
    """The exceptions that a handler names."""
    nodes = ast.walk(handler.type) if handler.type is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def content_faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What no file may contain, whoever it imports."""
    missing = {"ImportError", "ModuleNotFoundError"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and caught(node) & missing:
            yield node.lineno, "a missing module is no reason for a fallback"
        elif isinstance(node, ast.Call) and called(node) == "suppress":
            if {arg.id for arg in node.args if isinstance(arg, ast.Name)} & missing:
                yield node.lineno, "a missing module is no reason for a fallback"
        elif isinstance(node, ast.Attribute | ast.alias):
            name = node.attr if isinstance(node, ast.Attribute) else node.name
            if name == "autotune":
                yield node.lineno, "autotune: tiles come from the table in kernels/tiles.py"
            elif name == "atomic_add":
                yield node.lineno, "atomic_add: a sum in the order of arrival is not reproducible"


def violations(sources: dict[str, str]) -> list[str]:
    """Every broken rule in the files {path: source}, as `path:line: reason`."""
    modules = {module_of(path) for path in sources}
    found = []
    for path, source in sources.items():
        tree = ast.parse(source, path)
        for item in imports(path, tree, modules):
            fault = import_fault(path, item)
            if fault is not None:
                found.append(f"{path}:{item.line}: {fault}")
        found += [f"{path}:{line}: {fault}" for line, fault in content_faults(tree)]
        lines = source.count("\n")
        if lines >= MAX_LINES:
            found.append(f"{path}:{lines}: {lines} lines, {MAX_LINES - 1} are the most")
    return found


def package_sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tokenyard").rglob("*.py"))
    }


def test_package_follows_the_rules() -> None:
    sources = package_sources()
    assert "tokenyard/backend.py" in sources
    assert violations(sources) == []


# Files that the sources below import from, so that submodules are known as such.
NEIGHBOURS = [
    "__init__", "backend", "check", "conventions", "routing", "registration", "ops/__init__",
    "ops/permute", "ops/rows", "kernels/permute", "kernels/tiles", "kernels/device/math",
    "nn/moe", "parallel/exchange", "cli/main",
]  # fmt: skip

FORBIDDEN = [
    ("check", "from tokenyard import backend"),
    ("check", "from . import backend"),
    ("backend", "from tokenyard.routing import Routing"),
    ("registration", "from tokenyard import routing"),
    ("routing", "from tokenyard.conventions import to_te"),
    ("conventions", "from tokenyard import backend"),
    ("conventions", "import tokenyard.ops.rows"),
    ("ops/rows", "from tokenyard.ops.permute import permute_reference"),
    ("ops/new", "from tokenyard import conventions"),
    ("ops/new", "import tokenyard"),
    ("ops/new", "from tokenyard import Routing"),
    ("ops/new", "from tokenyard.ops.permute import permute"),
    ("ops/new", "from .permute import _permute"),
    ("ops/new", "from tokenyard.ops import permute"),
    ("ops/new", "import tokenyard.ops.permute"),
    ("ops/new", "from tokenyard.ops import permute_reference"),
    ("ops/new", "from tokenyard.kernels import permute"),
    ("ops/new", "def f():\n    import tokenyard.kernels.permute"),
    ("ops/new", "from importlib import import_module\nimport_module('tokenyard.kernels.permute')"),
    ("ops/new", "import importlib\nimportlib.import_module(f'tokenyard.kernels.{name}')"),
    ("ops/new", "from tokenyard.nn import moe"),
    ("ops/new", "import triton"),
    ("ops/new", "import numpy as np"),
    ("kernels/new", "from tokenyard import check"),
    ("kernels/new", "from tokenyard.kernels import permute"),
    ("kernels/new", "from .permute import launch"),
    ("kernels/new", "import transformers"),
    ("backend", "from tokenyard.kernels import permute"),
    ("nn/new", "from tokenyard.parallel import exchange"),
    ("nn/new", "from tokenyard.kernels.tiles import TILES"),
    ("parallel/new", "from tokenyard.cli import main"),
    ("parallel/new", "from tokenyard.integrations import transformers"),
    ("compat/new", "import transformers"),
    ("cli/new", "import triton.language as tl"),
    ("compat/new", "from tokenyard.parallel import exchange"),
    ("nn/new", "from rich.table import Table"),
    ("nn/new", "try:\n    import json\nexcept ImportError:\n    json = None"),
    ("nn/new", "try:\n    import json\nexcept (ValueError, ModuleNotFoundError):\n    pass"),
    ("nn/new", "import contextlib\nwith contextlib.suppress(ImportError):\n    import json"),
    ("kernels/new", "import triton\n@triton.autotune([], [])\ndef k(): ..."),
    ("kernels/new", "from triton import autotune"),
    ("kernels/new", "import triton.language as tl\ndef k(p, x): tl.atomic_add(p, x)"),
    ("kernels/new", "from triton.language import atomic_add"),
    ("nn/new", "x = 1\n" * MAX_LINES),
]

PERMITTED = [
    ("backend", "import importlib\nimportlib.import_module(f'tokenyard.kernels.{name}')"),
    ("routing", "from tokenyard import backend\nfrom tokenyard.registration import Operator"),
    ("conventions", "from tokenyard import check\nfrom tokenyard.routing import Routing"),
    ("ops/new", "from tokenyard.ops.rows import gather_rows\nfrom tokenyard.ops import rows"),
    ("ops/new", "from tokenyard.ops.permute import ACTIVATIONS, GateUpLayout, permute_reference"),
    ("ops/__init__", "from tokenyard.ops.permute import permute"),
    ("kernels/new", "import torch\nimport triton\nfrom tokenyard.kernels.tiles import TILES"),
    ("kernels/new", "from tokenyard.kernels.device.math import silu"),
    ("nn/new", "import tokenyard\nfrom tokenyard.ops.permute import permute\nfrom .moe import MoE"),
    ("integrations/new", "import transformers\nfrom tokenyard.nn.moe import MoE"),
    ("integrations/new", "from tokenyard.parallel.exchange import dispatch"),
    ("cli/new", "import numpy\nfrom tokenyard.parallel import exchange"),
    ("cli/new", "import typer\nfrom rich.table import Table\nfrom tokenyard.cli.main import app"),
    ("nn/new", "x = 1\n" * (MAX_LINES - 1)),
]


def with_neighbours(file: str, source: str) -> dict[str, str]:
    sources = {f"tokenyard/{name}.py": "" for name in NEIGHBOURS}
    sources[f"tokenyard/{file}.py"] = source
    return sources


@pytest.mark.parametrize(("file", "source"), FORBIDDEN)
def test_a_broken_rule_is_reported(file: str, source: str) -> None:
    found = violations(with_neighbours(file, source))
    assert len(found) == 1
    assert found[0].startswith(f"tokenyard/{file}.py:")


@pytest.mark.parametrize(("file", "source"), PERMITTED)
def test_what_is_allowed_is_not_reported(file: str, source: str) -> None:
    assert violations(with_neighbours(file, source)) == []


REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(name + " is refused")

sys.meta_path.insert(0, Refuse())
"""


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_package_imports_with_torch_alone() -> None:
    optional = sorted(name for name, where in THIRD_PARTY.items() if where is not None)
    refuse = REFUSE.replace("{refused}", repr(set(optional)))
    done = run_python(f"{refuse}\nimport tokenyard")
    assert done.returncode == 0, done.stderr
    for name in optional:
        assert f"{name} is refused" in run_python(f"{refuse}\nimport {name}").stderr


def test_importing_the_package_imports_no_optional_module() -> None:
    optional = sorted(name for name, where in THIRD_PARTY.items() if where is not None)
    optional.remove("numpy")  # torch itself imports it
    loaded = f"print([name for name in {optional} if name in sys.modules])"
    assert run_python(f"import sys, torch, tokenyard\n{loaded}").stdout.strip() == "[]"
    assert run_python(f"import sys, triton\n{loaded}").stdout.strip() == "['triton']"
