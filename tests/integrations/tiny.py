"""Every experts class that transformers decorates, found in its source, and tiny instances of them."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedConfig

from tokenyard.integrations import tiny_models

VERSION = Version(transformers.__version__)
MISREAD = {"hunyuan_v1_moe", "phimoe"} if Version("5.8") > VERSION else set()
"""Routers that give weights [T,E], of which their own experts read the first columns."""
MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation(?:\(.*?\))?\s*\nclass (\w+)", re.M | re.S)


def decorated() -> Iterator[tuple[str, str]]:
    """(module, class) of every experts class."""
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        for name in DECORATED.findall(file.read_text(encoding="utf-8")):
            yield f"transformers.models.{file.parent.name}.{file.stem}", name


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """In place, parts too."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif (value is None or type(value) is int) and "intermediate" in name:
            setattr(config, name, 8)
        elif (size := tiny_models.size_of(name, value)) is not None:
            setattr(config, name, size)
    return config


def configs(module: Any, experts: type[nn.Module]) -> Iterator[PreTrainedConfig]:
    """Of the constructor's annotation, then of the module, those for text first."""
    (annotation, *_) = [
        parameter.annotation
        for parameter in list(inspect.signature(experts.__init__).parameters.values())[1:]
    ]
    found = [
        value
        for value in [annotation, *vars(module).values()]
        if inspect.isclass(value)
        and issubclass(value, PreTrainedConfig)
        and value is not PreTrainedConfig
    ]
    found[1:] = sorted(found[1:], key=lambda value: "Text" not in value.__name__)
    for kind in found:
        config = kind()
        yield shrink(config)
        for part in vars(config).values():
            if isinstance(part, PreTrainedConfig):
                yield part


def has_language_model(module_name: str) -> bool:
    return _language_model(importlib.import_module(module_name)) is not None


def _language_model(module: Any) -> Any:
    names = [name for name in vars(module) if name.endswith("ForCausalLM")]
    return getattr(module, names[0]) if names else None


def model_of(module_name: str) -> nn.Module | None:
    """A tiny causal language model of a module, or None if it has none."""
    model = _language_model(importlib.import_module(module_name))
    if model is None:
        return None
    return model(tiny_models.tiny_config(model.config_class())).eval()


def experts_of(module_name: str, name: str) -> nn.Module:
    """A tiny instance, whose parameters are random."""
    module = importlib.import_module(module_name)
    experts = getattr(module, name)
    failures = []
    for config in configs(module, experts):
        parameters = list(inspect.signature(experts.__init__).parameters)[2:]
        values = {"intermediate_size": 8, "layer_idx": 0}
        sizes = {name: value for name, value in values.items() if name in parameters}
        try:
            made = experts(config, **sizes)
        except Exception as failure:
            failures.append(f"{type(config).__name__}: {failure!r}")
            continue
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
        return made
    raise RuntimeError("; ".join(failures) or "no config")
