"""grouped_gemm: cases for the harness. FLOPs count no padding; operands are normal random numbers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import tokenyard
from benchmarks import measure, peers
from benchmarks.case import Case
from benchmarks.shapes import Shape
from tokenyard.kernels import grouped_gemm as kernels

BF16 = torch.bfloat16


def routing_of(shape: Shape, kind: str = "random") -> tokenyard.Routing:
    scores = torch.rand(shape.T, shape.E, device="cuda")
    if kind == "zipf":  # the draw of an expert falls as 1 / its rank
        scores = scores.log() * torch.arange(1, shape.E + 1, device="cuda")
    if kind == "all to one":
        scores[:, 0] += 2
        ids = scores.topk(1).indices.repeat(1, shape.K)
        return tokenyard.route(ids, shape.E)
    return tokenyard.route(scores.topk(shape.K).indices, shape.E)


def _close(got: Tensor, want: Tensor) -> None:
    error = measure.relative_error(got, want)
    assert error < 5e-3, f"off by {error:.1e}"


def _sampled(routing: tokenyard.Routing) -> list[tuple[int, slice]]:
    """The first, a middle and the last expert, and their last rows."""
    offsets = routing.expert_offsets.tolist()
    experts = (0, routing.num_experts // 2, routing.num_experts - 1)
    return [(e, slice(max(offsets[e + 1] - 200, offsets[e]), offsets[e + 1])) for e in experts]


def _multiply(
    name: str, routing: tokenyard.Routing, size_in: int, size_out: int, layout: str, with_all: bool
) -> Case:
    x = torch.randn(routing.num_rows, size_in, device="cuda", dtype=BF16)
    sizes = (size_out, size_in) if layout == "ENK" else (size_in, size_out)
    weight = torch.randn(routing.num_experts, *sizes, device="cuda", dtype=BF16) * size_in**-0.5
    groups = routing.expert_offsets, routing.tokens_per_expert

    def run() -> Tensor:
        return kernels.grouped_gemm(x, weight, None, *groups, layout)

    def check() -> None:
        out = run()
        for expert, rows in _sampled(routing):
            matrix = weight[expert].t() if layout == "ENK" else weight[expert]
            _close(out[rows], x[rows].double() @ matrix.double())

    others = peers.grouped_gemm(x, weight, groups[0], layout) if with_all else {}
    num_flops = 2 * routing.num_rows * size_in * size_out
    return Case(name, run, check, others, num_flops=num_flops)


def _weight(name: str, routing: tokenyard.Routing, size_in: int, size_out: int) -> Case:
    x = torch.randn(routing.num_rows, size_in, device="cuda", dtype=BF16)
    grad = torch.randn(routing.num_rows, size_out, device="cuda", dtype=BF16)
    out = torch.empty(routing.num_experts, size_out, size_in, device="cuda", dtype=BF16)
    groups = routing.expert_offsets, routing.tokens_per_expert

    def run() -> None:
        kernels.weight_gradient(grad, x, *groups, out, False)

    def check() -> None:
        run()
        offsets = routing.expert_offsets.tolist()
        for expert, _ in _sampled(routing):
            rows = slice(offsets[expert], offsets[expert + 1])
            _close(out[expert], grad[rows].double().t() @ x[rows].double())

    num_flops = 2 * routing.num_rows * size_in * size_out
    others = peers.weight_gradient(grad, x, groups[0])
    return Case(name, run, check, others, num_flops=num_flops)


def grouped_gemm(shape: Shape) -> Iterator[Case]:
    """Up (H -> 2I) and down (I -> H): forward, input gradient, weight gradient."""
    if shape.name.endswith("32k"):
        return  # as the same model's smaller batch
    routing = routing_of(shape)
    gemms = {"up": (shape.H, 2 * shape.I), "down": (shape.I, shape.H)}
    if shape.H * shape.I > 3e7:
        del gemms["down"]
    for name, (size_in, size_out) in gemms.items():
        yield _multiply(f"{name} forward", routing, size_in, size_out, "ENK", True)
        yield _multiply(f"{name} input gradient", routing, size_out, size_in, "EKN", True)
        yield _weight(f"{name} weight gradient", routing, size_in, size_out)
    if shape.name.startswith("qwen3"):
        for kind in ("zipf", "all to one"):
            uneven = routing_of(shape, kind)
            yield _multiply(f"up forward, {kind}", uneven, *gemms["up"], "ENK", False)


DECODE_SHAPES = {"deepseek-v3": (8, 256, 7168, 4096), "qwen3-30b": (8, 128, 2048, 1536)}


def decode() -> dict[str, dict[str, float]]:
    """Up projection of T tokens in a CUDA graph, beside the time to read the weights of their experts."""
    results = {}
    for name, (top_k, num_experts, size_in, size_out) in DECODE_SHAPES.items():
        weight = torch.randn(num_experts, size_out, size_in, device="cuda", dtype=BF16)
        for num_tokens in (1, 16, 128):
            # eight routings in turn, so that the weights of one are not in the cache for the next
            routings = [
                routing_of(Shape(name, num_tokens, top_k, num_experts, size_in, size_out))
                for _ in range(8)
            ]
            x = torch.randn(num_tokens * top_k, size_in, device="cuda", dtype=BF16)

            def calls(routings: list = routings, x: Tensor = x, w: Tensor = weight) -> list[Tensor]:
                return [tokenyard.grouped_gemm(x, w, r, layout="ENK") for r in routings]

            touched = sum(int((r.tokens_per_expert > 0).sum()) for r in routings) / 8
            num_bytes = touched * size_in * size_out * 2
            microseconds = measure.graph_microseconds(calls, 20) / 8
            floor = num_bytes / measure.copy_rate(4 << 30) * 1e3
            results[f"{name}, T {num_tokens}"] = {
                "microseconds": microseconds,
                "share_of_weight_read": floor / microseconds,
            }
    return results


OPERATORS: dict[str, Callable[[Shape], Iterator[Case]]] = {"grouped_gemm": grouped_gemm}
