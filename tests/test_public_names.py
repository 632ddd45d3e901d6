"""The public names: which they are, and that each is reachable and explains its arguments."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import tokenyard

PUBLIC_NAMES = [
    "ArgumentError",
    "LoRA",
    "RankTree",
    "Routing",
    "activation",
    "activation_reference",
    "conventions",
    "expert_mlp",
    "expert_mlp_reference",
    "explain",
    "grouped_gemm",
    "grouped_gemm_add_weight_gradient",
    "grouped_gemm_reference",
    "load_balance_loss",
    "nn",
    "permute",
    "permute_reference",
    "permute_slots",
    "permute_slots_reference",
    "route",
    "router_logits",
    "router_logits_reference",
    "sort_chunks",
    "sort_chunks_reference",
    "topk",
    "topk_reference",
    "unpermute",
    "unpermute_reference",
    "update_selection_bias",
    "use",
    "z_loss",
]


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of what `function` takes, except *args and **kwargs."""
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def undocumented(function: Callable[..., Any]) -> list[str]:
    """The parameters of `function` that its docstring does not name, or a note that it has none."""
    doc = function.__doc__
    if not doc:
        return ["<no docstring>"]
    return [name for name in parameters(function) if not re.search(rf"\b{re.escape(name)}\b", doc)]


def test_all_is_the_documented_list() -> None:
    assert tokenyard.__all__ == PUBLIC_NAMES
    assert sorted(PUBLIC_NAMES) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_name_is_reachable(name: str) -> None:
    assert hasattr(tokenyard, name)


def test_nothing_else_is_public() -> None:
    """Whatever the package itself defines or imports is listed; submodules need not be."""
    extra = [
        name
        for name, value in vars(tokenyard).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in PUBLIC_NAMES
    ]
    assert extra == []


DEFINITIONS = [name for name in PUBLIC_NAMES if name.endswith("_reference")]
DOCUMENTED = [name for name in PUBLIC_NAMES if name not in DEFINITIONS]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_names_every_argument(name: str) -> None:
    value = getattr(tokenyard, name)
    if inspect.isclass(value) and issubclass(value, Exception):
        assert value.__doc__
    elif callable(value):
        assert undocumented(value) == []


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definition_takes_the_arguments_of_its_operator(name: str) -> None:
    """Its docstring points to the operator's, which explains them; it may do without some."""
    operator = name.removesuffix("_reference")
    definition = getattr(tokenyard, name)
    assert set(parameters(definition)) <= set(parameters(getattr(tokenyard, operator)))
    assert f"`{operator}`" in (definition.__doc__ or "")


def test_a_missing_argument_is_noticed() -> None:
    def silent(x: int) -> int:
        return x

    def partial(rows: int, weights: int) -> int:
        """Sum the rows."""
        return rows + weights

    assert undocumented(silent) == ["<no docstring>"]
    assert undocumented(partial) == ["weights"]
