"""Two layers of Qwen3-30B's shape in transformers, by experts implementation: prefill, training step, decode.

python -m benchmarks.transformers_gpu [--json FILE] [--tiny]    --tiny: small sizes, on the CPU too
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
LIMIT = 3e-2


def config(tiny: bool) -> Qwen3MoeConfig:
    sizes = dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, vocab_size=32768)
    if tiny:
        sizes = dict(hidden_size=64, moe_intermediate_size=32, num_experts=8, vocab_size=256)
    return Qwen3MoeConfig(
        **sizes, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128 if not tiny else 16,
        num_experts_per_tok=8 if not tiny else 2, norm_topk_prob=True,
    )  # fmt: skip


def with_way(model: Any, way: str, call: Callable[[], Any]) -> Any:
    model.set_experts_implementation(way)
    return call()


def prefill(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, logits_to_keep=1).logits


def train(model: Any, ids: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def cases(model: Any, tiny: bool, device: str) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """Tokens of the experts, and the call."""
    num_tokens = 8192 if not tiny else 64

    def tokens(*shape: int) -> Tensor:
        return torch.randint(model.config.vocab_size, shape, device=device)

    long = tokens(1, num_tokens)
    found: dict[str, tuple[int, Callable[[], Tensor]]] = {
        f"prefill {num_tokens}": (num_tokens, partial(prefill, model, long)),
        f"training step {num_tokens}": (num_tokens, partial(train, model, long)),
    }
    for (
        batch
    ) in BATCHES:  # a token of each sequence, without a cache: the experts see no difference
        found[f"decode {batch}"] = (batch, partial(prefill, model, tokens(batch, 1)))
    return found


def compare(model: Any, num_tokens: int, call: Callable[[], Tensor], device: str) -> dict[str, Any]:
    ways = [way for way in WAYS if way != "batched_mm" or num_tokens <= MANY]
    results = {way: with_way(model, way, call).float() for way in ways}
    ours = results.pop(switch.NAME)
    errors = {way: measure.relative_error(ours, theirs) for way, theirs in results.items()}
    worst = max(errors.values())
    if not worst < LIMIT:
        raise SystemExit(f"tokenyard differs: {errors}")
    functions = {way: partial(with_way, model, way, call) for way in ways}
    if device == "cuda":
        times = measure.gpu_milliseconds_in_turns(functions, rounds=3, warmup=50, repeat=100)
    else:
        seconds = measure.cpu_seconds(functions, repeats=3)
        times = {way: value * 1e3 for way, value in seconds.items()}
    return {"milliseconds": times, "relative_errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("needs a CUDA GPU, or --tiny")
    switch.register()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(options.tiny), dtype=torch.bfloat16)
    record = measure.environment(device, "transformers", "triton") | {"results": []}
    table = Table(title="Qwen3-MoE, two layers, bf16, milliseconds")
    for title in ("case", *WAYS):
        table.add_column(title, justify="left" if title == "case" else "right")
    for name, (num_tokens, call) in cases(model, options.tiny, device).items():
        found = compare(model, num_tokens, call, device)
        record["results"].append({"case": name} | found)
        if options.json:
            measure.write_result(options.json, record)
        times = found["milliseconds"]
        table.add_row(name, *(f"{times[way]:.3f}" if way in times else "" for way in WAYS))
        gc.collect()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
