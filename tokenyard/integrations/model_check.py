"""Compare the experts of a transformers model, layer by layer, run eagerly and by Tokenyard."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from tokenyard.integrations import transformers as switch
from tokenyard.integrations.tiny_models import tiny_config

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Layer:
    """What was found of the experts of one layer.

    name, kind      of the module; its class
    activation      that of `expert_mlp`, or None where the module's own gate is called
    difference      of the outputs, relative to the largest value
    gradient        the same of the gradients of the tokens
    milliseconds    forward of eager, grouped_mm (None where it fails) and tokenyard
    """

    name: str
    kind: str
    activation: str | None
    difference: float
    gradient: float
    milliseconds: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """`layers`, and the relative difference of the model's logits, or of its hidden states without a head."""

    layers: list[Layer]
    output: float


def config_of(name: str) -> PreTrainedConfig:
    """Of a folder, a config.json, a model type such as "qwen3_moe", or a name on the Hub."""
    if Path(name).exists() or HUB_NAME.fullmatch(name):
        return AutoConfig.from_pretrained(name)
    if name not in CONFIG_MAPPING:
        raise ValueError("there is no such file or folder, nor a model type of that name")
    return AutoConfig.for_model(name)


def model_of(name: str, full: bool) -> Any:
    """The model itself with `full`, else a tiny one of its config's text part with random weights."""
    if full and not (Path(name).is_dir() or HUB_NAME.fullmatch(name)):
        raise ValueError("--full takes a folder with weights, or a name on the Hub")
    config = config_of(name) if full else config_of(name).get_text_config()
    maker = _maker_of(config)
    if full:
        return maker.from_pretrained(name).eval()
    model = maker.from_config(tiny_config(config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def _maker_of(config: PreTrainedConfig) -> Any:
    """What makes the causal language model of a config, or where there is none, the model without a head."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_MAPPING:
        return AutoModel
    raise ValueError(f"transformers has no language model for {config.model_type}")


def experts_in(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "_apply_gate") and hasattr(module, "config")
    }


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    configs = {id(part.config): part.config for part in experts_in(model).values()}
    before = [config._experts_implementation for config in configs.values()]
    try:
        for config in configs.values():
            config._experts_implementation = name
        yield
    finally:
        for config, value in zip(configs.values(), before):
            config._experts_implementation = value


def check_model(model: Any, num_tokens: int, repeats: int = 5) -> Report:
    """Run random tokens through the model eagerly, and what reached its experts through both."""
    switch.register()
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, num_tokens), device=model.device)
    seen: dict[str, tuple[Any, ...]] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = (*args, *kwargs.values())

        return hook

    found = experts_in(model)
    hooks = [
        module.register_forward_pre_hook(remember(name), with_kwargs=True)
        for name, module in found.items()
    ]
    with torch.no_grad():
        with implementation(model, "eager"):
            want = _output(model, ids)
        for hook in hooks:
            hook.remove()
        with implementation(model, switch.NAME):
            got = _output(model, ids)
    layers = [_layer(model, name, found[name], seen[name], repeats) for name in seen]
    return Report(layers, _difference(got, want))


def _output(model: Any, ids: Tensor) -> Tensor:
    """Logits, or the last hidden states."""
    output: Any = model(ids, use_cache=False)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result


def _layer(
    model: nn.Module, name: str, experts: Any, inputs: tuple[Any, ...], repeats: int
) -> Layer:
    x = inputs[0].detach().requires_grad_()
    results: dict[str, tuple[Tensor, Tensor]] = {}
    times: dict[str, float | None] = {}
    for way in ("eager", "grouped_mm", switch.NAME):
        with implementation(model, way):
            try:
                results[way] = _step(experts, x, inputs[1:])
                times[way] = _milliseconds(experts, inputs, repeats)
            except (RuntimeError, ValueError, NotImplementedError):
                # grouped_mm, here for its speed, does not take every size and dtype
                if way != "grouped_mm":
                    raise
                times[way] = None
    (out, d_x), (want, d_want) = results[switch.NAME], results["eager"]
    return Layer(
        name,
        type(experts).__name__,
        switch.known_activation(experts),
        _difference(out, want),
        _difference(d_x, d_want),
        times,
    )


def _step(experts: Any, x: Tensor, others: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    out = experts(x, *others)
    (d_x,) = torch.autograd.grad(out.float().square().sum(), x)
    return out.detach(), d_x


def _milliseconds(experts: Any, inputs: tuple[Any, ...], repeats: int) -> float:
    """The least of a few calls."""

    def call() -> float:
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        experts(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.no_grad():
        return min(call() for _ in range(repeats)) * 1e3


def _difference(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
