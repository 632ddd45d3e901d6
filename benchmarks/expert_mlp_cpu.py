"""The expert MLP on the CPU, forward and backward, beside transformers' experts.

python -m benchmarks.expert_mlp_cpu [--repeats N] [--out FILE]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks import measure
from tokenyard.nn import Experts
from tokenyard.routing import route

SHAPE = dict(T=2048, H=512, I=256, E=32, K=4)
PEERS = ("eager", "grouped_mm")


def peer_experts(implementation: str, ours: Experts) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        hidden_size=ours.hidden_size,
        moe_intermediate_size=ours.intermediate_size,
        num_experts=ours.num_experts,
    )
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config).to(ours.down_proj.dtype)
    experts.load_state_dict(ours.state_dict())
    return experts


def steps(dtype: torch.dtype) -> dict[str, Callable[[], list[Tensor]]]:
    """Forward + backward of each implementation -> [out, d_x, d_weights, d_gate_up, d_down]."""
    torch.manual_seed(0)
    num_tokens, num_experts, top_k = SHAPE["T"], SHAPE["E"], SHAPE["K"]
    ours = Experts(num_experts, SHAPE["H"], SHAPE["I"], dtype=dtype)
    x = torch.randn(num_tokens, SHAPE["H"], dtype=dtype, requires_grad=True)
    scores, ids = torch.randn(num_tokens, num_experts).topk(top_k)
    weights = scores.softmax(-1).requires_grad_()
    grad = torch.randn(num_tokens, SHAPE["H"], dtype=dtype)

    def step(module: torch.nn.Module, forward: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        inputs = [x, weights, *module.parameters()]

        def run() -> list[Tensor]:
            out = forward()
            return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

        return run

    functions = {
        "tokenyard": step(ours, lambda: ours(x, route(ids, num_experts), weights)),
    }
    for name in PEERS:
        peer = peer_experts(name, ours)
        functions[f"transformers {name}"] = step(peer, lambda p=peer: p(x, ids, weights))
    return functions


def compare(dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    functions = steps(dtype)
    results = {name: run() for name, run in functions.items()}
    ours = results.pop("tokenyard")
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for name, theirs in results.items():
        for what, got, expected in zip(("out", "x", "weights", "w1", "w2"), ours, theirs):
            error = measure.relative_error(got, expected)
            if not error < limit:
                raise SystemExit(f"{dtype}: {what} differs from {name} by {error:.1e}")
    seconds = measure.cpu_seconds(functions, repeats=repeats)
    best = min(value for name, value in seconds.items() if name != "tokenyard")
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "milliseconds": {name: round(value * 1e3, 2) for name, value in seconds.items()},
        "ratio_to_better_peer": round(best / seconds["tokenyard"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [compare(dtype, options.repeats) for dtype in (torch.float32, torch.bfloat16)]
    table = Table(title=f"expert MLP forward + backward on the CPU, {SHAPE}, milliseconds")
    names = list(rows[0]["milliseconds"])
    for title in ("dtype", *names, "better peer / tokenyard"):
        table.add_column(title, justify="right")
    for row in rows:
        times = [f"{row['milliseconds'][name]:.1f}" for name in names]
        table.add_row(row["dtype"], *times, f"{row['ratio_to_better_peer']:.2f}")
    Console(width=120).print(table)
    if options.out:
        result = measure.environment("cpu", "transformers") | {"shape": SHAPE, "results": rows}
        measure.write_result(options.out, result)


if __name__ == "__main__":
    main()
