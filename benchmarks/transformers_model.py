"""Two layers of a Qwen3-MoE in transformers, by experts implementation: prefill, training step, decode.

python -m benchmarks.transformers_model [--json FILE] [--tiny]

On a GPU of Qwen3-30B's shape in bf16, on the CPU small in fp32; --tiny: sizes that take seconds, on both.
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks import measure
from tokenyard.integrations import transformers as switch

WAYS = (switch.NAME, "grouped_mm", "batched_mm", "eager")
BATCHES = (1, 16, 64)
MANY = 256
"""Tokens above which batched_mm, which copies a token's matrices, is left out."""


class Size(NamedTuple):
    """A configuration: prompt, dtype, the error allowed against the other ways, and sizes of the model."""

    num_tokens: int
    dtype: torch.dtype
    limit: float
    model: dict[str, int]


GPU = Size(
    8192, torch.bfloat16, 3e-2,
    dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
         num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=32768),
)  # fmt: skip
CPU = Size(
    2048, torch.float32, 1e-5,
    dict(hidden_size=512, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4,
         num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=4096),
)  # fmt: skip
TINY = Size(
    64, torch.bfloat16, 3e-2,
    dict(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
         num_attention_heads=32, num_key_value_heads=4, head_dim=16, vocab_size=256),
)  # fmt: skip


def model_of(size: Size, device: str) -> Any:
    config = Qwen3MoeConfig(**size.model, num_hidden_layers=2, norm_topk_prob=True)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype)


def with_way(model: Any, way: str, call: Callable[[], Any]) -> Any:
    model.set_experts_implementation(way)
    return call()


def prefill(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, logits_to_keep=1).logits


def train(model: Any, ids: Tensor) -> Tensor:
    """The gradient of the first layer's first matrices, which has passed through all others."""
    for parameter in model.parameters():
        parameter.grad = None
    model(ids, labels=ids, use_cache=False).loss.backward()
    return model.model.layers[0].mlp.experts.gate_up_proj.grad


def cases(model: Any, num_tokens: int) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """Tokens of the experts, and the call."""

    def tokens(*shape: int) -> Tensor:
        return torch.randint(model.config.vocab_size, shape, device=model.device)

    long = tokens(1, num_tokens)
    found: dict[str, tuple[int, Callable[[], Tensor]]] = {
        f"prefill {num_tokens}": (num_tokens, partial(prefill, model, long)),
        f"training step {num_tokens}": (num_tokens, partial(train, model, long)),
    }
    for batch in BATCHES:
        # a token of each sequence, without a cache: the experts see no difference
        found[f"decode {batch}"] = (batch, partial(prefill, model, tokens(batch, 1)))
    return found


def compare(
    model: Any, num_tokens: int, call: Callable[[], Tensor], limit: float
) -> dict[str, Any]:
    ways = [way for way in WAYS if way != "batched_mm" or num_tokens <= MANY]
    results = {way: with_way(model, way, call).float() for way in ways}
    ours = results.pop(switch.NAME)
    errors = {way: measure.relative_error(ours, theirs) for way, theirs in results.items()}
    if not max(errors.values()) < limit:
        raise SystemExit(f"tokenyard differs: {errors}")
    functions = {way: partial(with_way, model, way, call) for way in ways}
    if model.device.type == "cuda":
        times = measure.gpu_milliseconds_in_turns(functions, rounds=3, warmup=50, repeat=100)
    else:
        seconds = measure.cpu_seconds(functions, repeats=9 if num_tokens > MANY else 99)
        times = {way: value * 1e3 for way, value in seconds.items()}
    return {"milliseconds": times, "relative_errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = TINY if options.tiny else GPU if device == "cuda" else CPU
    switch.register()
    torch.manual_seed(0)
    model = model_of(size, device)
    dtype = str(size.dtype).removeprefix("torch.")
    record = measure.environment(device, "transformers", "triton")
    record |= {"dtype": dtype, "model": size.model, "results": []}
    table = Table(title=f"Qwen3-MoE, two layers, {dtype}, milliseconds")
    for title in ("case", *WAYS):
        table.add_column(title, justify="left" if title == "case" else "right")
    for name, (num_tokens, call) in cases(model, size.num_tokens).items():
        found = compare(model, num_tokens, call, size.limit)
        record["results"].append({"case": name} | found)
        if options.json:
            measure.write_result(options.json, record)
        times = found["milliseconds"]
        table.add_row(name, *(f"{times[way]:.3f}" if way in times else "" for way in WAYS))
        gc.collect()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
