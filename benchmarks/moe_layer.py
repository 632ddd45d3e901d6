"""moe_layer: the whole layer as cases for the harness.

Router, top-k, route, swiglu experts and combine, in bf16. FLOPs are those of the experts, 6TKHI forward and
18TKHI with backward. Every side computes one function; gradients are those of x, gate and both weights.

python -m benchmarks.moe_layer SHAPE ...    compile and compare the sides, peers included, without timing
"""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import tokenyard
from benchmarks import layer_peers, measure
from benchmarks.case import Case
from benchmarks.layer_peers import Layer, Side
from benchmarks.peers import Functions
from benchmarks.shapes import LAYERS, SHAPES, Shape

BF16 = torch.bfloat16
LIMIT = 0.02  # of a relative error, which for bf16 is some thousandths
FORWARD, BACKWARD = "layer forward", "layer forward + backward"
INFERENCE = "layer forward, no gradient"


def tokens(num_tokens: int, gate: Tensor, top_k: int) -> Tensor:
    """Random rows [T,H], of which none has equal logits as its K-th and its next: all sides choose alike."""
    x = torch.randn(num_tokens, gate.shape[1], device=gate.device, dtype=gate.dtype)
    if top_k == gate.shape[0]:
        return x
    while True:
        highest = F.linear(x, gate).topk(top_k + 1).values
        tied = (highest[:, -1] == highest[:, -2]).nonzero()[:, 0]
        if tied.numel() == 0:
            return x
        x[tied] = torch.randn_like(x[tied])


def layer_of(shape: Shape, device: str = "cuda", dtype: torch.dtype = BF16) -> Layer:
    def randn(*sizes: int) -> Tensor:
        weight = torch.randn(sizes, device=device, dtype=dtype)
        return weight.mul_(sizes[-1] ** -0.5).requires_grad_()

    gate = randn(shape.E, shape.H)
    with torch.no_grad():
        x = tokens(shape.T, gate, shape.K)
    w_gate_up = randn(shape.E, 2 * shape.I, shape.H)
    w_down = randn(shape.E, shape.H, shape.I)
    return Layer(shape, x.requires_grad_(), gate, w_gate_up, w_down, torch.randn_like(x))


def ours(layer: Layer) -> Side:
    def forward(x: Tensor) -> Tensor:
        logits = F.linear(x, layer.gate)
        weights, ids = tokenyard.topk(logits, layer.shape.K, normalize="sum")
        routing = tokenyard.route(ids, layer.shape.E)
        return tokenyard.expert_mlp(x, routing, weights, layer.w_gate_up, layer.w_down)

    return Side(layer, forward, (layer.gate, layer.w_gate_up, layer.w_down))


def ours_as_module(layer: Layer) -> Side:
    """nn.MoE, whose router is a linear layer in fp32: near ties it chooses otherwise."""
    shape = layer.shape
    moe = tokenyard.nn.MoE(shape.H, shape.I, shape.E, shape.K, device="meta", dtype=layer.x.dtype)
    moe.gate.weight = gate = nn.Parameter(layer.gate.detach())
    moe.experts.gate_up_proj = w_gate_up = nn.Parameter(layer.w_gate_up.detach())
    moe.experts.down_proj = w_down = nn.Parameter(layer.w_down.detach())
    weights = gate, w_gate_up, w_down
    return Side(layer, lambda x: moe(x)[0], weights, same_function=False)


class Definition:
    """Of what one expert's tokens get: the layer in fp64, with logits as rounded by the layer.

    Compared are out, d_x of these tokens, and d_gate, d_w_gate_up, d_w_down of this expert.
    """

    def __init__(self, layer: Layer, expert: int) -> None:
        shape = layer.shape
        with torch.no_grad():
            logits, ids = F.linear(layer.x, layer.gate).topk(shape.K)
        self.expert = expert
        self.tokens = (ids == expert).any(1).nonzero()[:, 0]
        ids = ids[self.tokens]
        x = layer.x.detach()[self.tokens].double()
        d_out = layer.d_out[self.tokens].double()
        logits = logits[self.tokens].double().requires_grad_()
        weights = logits.softmax(-1)
        d_weights = torch.zeros_like(weights)
        out, d_x = torch.zeros_like(x), torch.zeros_like(x)
        for e in range(shape.E):
            row, choice = (ids == e).nonzero(as_tuple=True)
            operands = [
                value.detach().double().requires_grad_()
                for value in (x[row], layer.w_gate_up[e], layer.w_down[e])
            ]
            rows, w_gate_up, w_down = operands
            gate, up = (rows @ w_gate_up.t()).chunk(2, -1)
            y = (F.silu(gate) * up) @ w_down.t()
            weight = weights[row, choice, None].detach()
            wanted = operands if e == expert else operands[:1]
            d_rows, *d_matrices = torch.autograd.grad(y, wanted, d_out[row] * weight)
            out.index_add_(0, row, y.detach() * weight)
            d_x.index_add_(0, row, d_rows)
            d_weights[row, choice] = (d_out[row] * y.detach()).sum(1)
            if e == expert:
                self.d_w_gate_up, self.d_w_down = d_matrices
        (d_logits,) = torch.autograd.grad(weights, logits, d_weights)
        d_x += (d_logits[..., None] * layer.gate.detach()[ids].double()).sum(1)
        self.d_gate = (d_logits * (ids == expert)).sum(1) @ x
        self.out, self.d_x = out, d_x

    def errors(self, side: Side) -> dict[str, float]:
        """Relative, in the norm."""
        inferred = inference(side)[self.tokens]
        out = recorded(side)
        gradients = gradients_of(side, out)
        d_x, d_gate, d_w_gate_up, d_w_down = gradients
        d_w_gate_up = d_w_gate_up[self.expert]
        if side.interleaved:
            halves = d_w_gate_up.unflatten(0, (-1, 2)).transpose(0, 1)
            d_w_gate_up = halves.reshape(d_w_gate_up.shape)
        pairs = {
            "out": (out.detach()[self.tokens], self.out),
            "out, no gradient": (inferred, self.out),
            "d_x": (d_x[self.tokens], self.d_x),
            "d_gate": (d_gate[self.expert], self.d_gate),
            "d_w_gate_up": (d_w_gate_up, self.d_w_gate_up),
            "d_w_down": (d_w_down[self.expert], self.d_w_down),
        }
        return {name: measure.relative_error(*pair) for name, pair in pairs.items()}


def inference(side: Side) -> Tensor:
    with torch.no_grad():
        return side.forward(side.layer.x)


def recorded(side: Side) -> Tensor:
    return side.forward(side.layer.x)


def gradients_of(side: Side, out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (side.layer.x, *side.weights), side.layer.d_out)


def step(side: Side) -> tuple[Tensor, ...]:
    return gradients_of(side, recorded(side))


def memory(side: Side) -> dict[str, int]:
    """Bytes kept for the backward besides the output; and most bytes used, gradients included."""
    step(side)  # workspaces are there from now on
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = recorded(side)
    saved = torch.cuda.memory_allocated() - before - out.nbytes
    gradients = gradients_of(side, out)
    del out, gradients
    torch.cuda.synchronize()
    return {"saved_bytes": saved, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def _sides(layer: Layer, with_peers: bool) -> tuple[dict[str, Side], dict[str, Any]]:
    """The sides whose values and gradients are right, and what was found out about each."""
    sides = {"ours": ours(layer), layer_peers.COMPOSED: layer_peers.composed(layer)}
    facts: dict[str, Any] = {"errors": {}, "memory": {}, "left_out": {}}
    if with_peers:
        sides["ours, nn.MoE"] = ours_as_module(layer)
        for name in layer_peers.PEERS:
            side = layer_peers.made(name, layer)
            if isinstance(side, Side):
                sides[name] = side
            else:
                facts["left_out"][name] = side
    definition = Definition(layer, layer.shape.E // 2)
    for name, side in list(sides.items()):
        try:
            if side.same_function:
                errors = facts["errors"][name] = definition.errors(side)
                if name in layer_peers.PEERS and not max(errors.values()) < 4 * LIMIT:
                    raise layer_peers.Unavailable("its values or gradients are wrong")
            facts["memory"][name] = memory(side)
        except Exception as failure:  # of a peer, whatever it is, shall not end the run
            if name not in layer_peers.PEERS:
                raise
            facts["left_out"][name] = layer_peers.reason(failure)
            del sides[name]
        torch.cuda.empty_cache()
    return sides, facts


def _call(function: Callable[[Side], object], sides: dict[str, Side], name: str) -> object:
    return function(sides[name])


def moe_layer(shape: Shape, with_peers: bool = False) -> Iterator[Case]:
    sides, facts = _sides(layer_of(shape), with_peers)

    def check() -> None:
        for quantity, error in facts["errors"]["ours"].items():
            assert error < LIMIT, f"{quantity} is off by {error:.1e}"

    # turns long enough for the clock that a side leaves the GPU
    timing = {"rounds": 6, "repeat": 100}
    functions = {INFERENCE: inference, FORWARD: recorded, BACKWARD: step}
    for case, function in functions.items():
        # sides are looked up when called, so that a case keeps no weights alive
        calls: Functions = {name: partial(_call, function, sides, name) for name in sides}
        run = calls.pop("ours")
        num_flops = 6 * shape.T * shape.K * shape.H * shape.I * (3 if case == BACKWARD else 1)
        found = facts if case == BACKWARD else {}
        yield Case(case, run, check, calls, num_flops=num_flops, facts=found, **timing)
    sides.clear()
    gc.collect()


DECODE_TOKENS = (1, 16, 128)
DECODE_SHAPES = ("qwen3-30b-a3b", "deepseek-v3")
DECODE_CALLS = 8


def decode(names: Iterable[str], with_peers: bool = False) -> dict[str, dict[str, Any]]:
    """The layer of few tokens in a CUDA graph, beside the time to read the weights of their experts."""
    sizes = [replace(SHAPES[name], T=max(DECODE_TOKENS)) for name in DECODE_SHAPES if name in names]
    layers = [layer_of(shape) for shape in sizes]
    inputs = {(layer.shape.name, n): _inputs(layer, n) for layer in layers for n in DECODE_TOKENS}
    results: dict[tuple[str, int], dict[str, Any]] = {
        key: {"weight_read_microseconds": floor} for key, (_, floor) in inputs.items()
    }
    makers: dict[str, Callable[[Layer], Side | str]] = {
        "ours": ours,
        layer_peers.COMPOSED: layer_peers.composed,
    }
    if with_peers:  # at the end, since little works after a capture that failed
        makers["SonicMoE"] = partial(layer_peers.made, "SonicMoE")
    for name, make in makers.items():
        failure = None
        for layer in layers:
            side = failure or make(layer)
            for num_tokens in DECODE_TOKENS:
                key = layer.shape.name, num_tokens
                found = _replayed(side, *inputs[key]) if isinstance(side, Side) else side
                results[key][name] = found
                if isinstance(found, str):
                    side = failure = found
    return {f"{name}, T {num_tokens}": row for (name, num_tokens), row in results.items()}


def _inputs(layer: Layer, num_tokens: int) -> tuple[list[Tensor], float]:
    """Tokens of several calls, whose weights are not in the cache for the next; the time to read them."""
    shape = layer.shape
    with torch.no_grad():
        xs = [tokens(num_tokens, layer.gate, shape.K) for _ in range(DECODE_CALLS)]
        chosen = [F.linear(x, layer.gate).topk(shape.K).indices for x in xs]
    touched = sum(ids.unique().numel() for ids in chosen) / DECODE_CALLS
    num_bytes = touched * 3 * shape.H * shape.I * 2
    return xs, num_bytes / measure.copy_rate(4 << 30) * 1e3


def _replayed(side: Side, xs: list[Tensor], floor: float) -> dict[str, float] | str:
    def calls() -> list[Tensor]:
        return [side.forward(x) for x in xs]

    try:
        with torch.no_grad():
            microseconds = measure.graph_microseconds(calls, 20) / len(xs)
    except Exception as failure:  # some peers cannot be captured
        return layer_peers.reason(failure)
    return {"microseconds": microseconds, "share_of_weight_read": floor / microseconds}


def table_of(results: dict[tuple[str, str], dict[str, Any]]) -> Table:
    """Rates of the three cases, memory and errors, a line for each side of each shape."""
    table = Table(title="MoE layer, TFLOP/s; saved and peak MiB; relative errors")
    titles = ("shape", "side", "no gradient", "forward", "+ backward", "saved", "peak", "errors")
    for title in titles:
        table.add_column(title, justify="left" if title in ("shape", "side") else "right")
    for shape in LAYERS:
        facts = results.get((BACKWARD, shape))
        if facts is None:
            continue
        for side, used in facts["memory"].items():
            rates = []
            for case in (INFERENCE, FORWARD, BACKWARD):
                row = results[case, shape]
                row = row if side == "ours" else row.get("peers", {}).get(side, {})
                rate = row.get("teraflops_per_second")
                rates.append("" if rate is None else f"{rate:.0f}")
            errors = facts["errors"].get(side, {})
            table.add_row(
                shape,
                side,
                *rates,
                *(f"{used[key] / 2**20:.0f}" for key in ("saved_bytes", "peak_bytes")),
                " ".join(f"{error:.1e}" for error in errors.values()),
            )
        for side, why in facts["left_out"].items():
            table.add_row(shape, side, why[:40])
    return table


OPERATORS: dict[str, Callable[[Shape], Iterator[Case]]] = {"moe_layer": moe_layer}


def main() -> None:
    for name in sys.argv[1:]:
        _, facts = _sides(layer_of(SHAPES[name]), with_peers=True)
        print(name, facts)


if __name__ == "__main__":
    main()
