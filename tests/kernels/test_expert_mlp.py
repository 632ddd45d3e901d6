"""The kernels of activation, and expert_mlp in stages, in the interpreter against the definitions."""

import os
from typing import Any

import pytest
import torch
from launches import launched
from torch import Tensor

import tokenyard
from tokenyard import use
from tokenyard.kernels import expert_mlp, grouped_gemm
from tokenyard.kernels.tiles import GemmTile
from tokenyard.ops.activation import GATED, UNGATED

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def small_tile(arch: str, dtype: torch.dtype, bucket: str, *sizes: int) -> tuple[Any, str]:
        rows = bucket.split()[-1]
        return GemmTile(int(rows) if rows.isdigit() else 32, 16, 16, 4, 2), "test"

    for module in (expert_mlp, grouped_gemm):
        monkeypatch.setattr(module, "gemm_tile", small_tile)


def both(call: Any, leaves: list[Tensor], grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients: by kernels, and by the definition."""

    def run() -> list[Tensor]:
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        out = call(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    got, names = launched(run)
    assert names or not grad.numel()
    with use("reference"):
        return got, run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", GATED + UNGATED)
def test_activation(kind: Any, dtype: torch.dtype, poisoned_memory: None) -> None:
    z = torch.randn(37, 2 * 21) * 5
    z[0] = torch.tensor([0.0, -0.0, 7.0, -7.0, 8.0, -60.0, 90.0] * 6)
    size = 42 if kind in UNGATED else 21
    tolerance = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for layout in ("concatenated", "interleaved"):
        for x in (z.to(dtype), z.to(dtype).t().contiguous().t()):
            got, want = both(
                lambda z, layout=layout: tokenyard.activation(z, kind, layout),
                [x],
                torch.randn(37, size),
            )
            for ours, theirs in zip(got, want):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_wide_rows_and_none() -> None:
    for shape in ((3, 2 * 1100), (0, 8)):
        got, want = both(
            tokenyard.activation, [torch.randn(shape)], torch.randn(shape[0], shape[1] // 2)
        )
        for ours, theirs in zip(got, want):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_fp64_takes_the_definition() -> None:
    _, names = launched(lambda: tokenyard.activation(torch.randn(3, 8, dtype=torch.float64)))
    assert names == []


CASES = [
    {},
    {"activation": "geglu", "gate_up_layout": "interleaved", "weight_layout": "EKN"},
    {"activation": "clamped_swiglu", "reduction": "expert", "recompute": True},
    {"activation": "relu2", "reduction": tokenyard.RankTree(2)},
    {"weights_on": "input", "reduction": "expert"},
]


def by_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way != "few rows":
        for module in (expert_mlp, grouped_gemm):
            monkeypatch.setattr(module, "bucket_of", lambda rows_per_expert: "many")
        monkeypatch.setattr(expert_mlp, "gathers", lambda *inputs: way == "gathered")


@pytest.mark.parametrize("way", ["few rows", "gathered", "permuted"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_expert_mlp(
    options: dict[str, Any],
    biases: bool,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    poisoned_memory: None,
) -> None:
    """Dropped choices, an empty expert, padded rows; every gradient."""
    by_way(monkeypatch, way)
    dtype = torch.float16 if biases == (way == "gathered") else torch.float32
    num_tokens, num_experts, hidden, inner = 45, 4, 24, 40
    ids = torch.tensor([0, 1, 3])[torch.rand(num_tokens, 3).argsort(1)][:, :2]
    ids[5, 1], ids[7] = -1, -1
    routing = tokenyard.route(ids, num_experts, row_alignment=8)
    first = inner if options.get("activation") == "relu2" else 2 * inner
    shapes = [(num_experts, first, hidden), (num_experts, hidden, inner)]
    if options.get("weight_layout") == "EKN":
        shapes = [(e, k, n) for e, n, k in shapes]
    x, weights = torch.randn(num_tokens, hidden).to(dtype), torch.rand(num_tokens, 2)
    matrices = [(torch.randn(shape) / shape[2] ** 0.5).to(dtype) for shape in shapes]
    leaves = [x, weights, *matrices]
    if biases:
        leaves += [torch.randn(num_experts, size).to(dtype) for size in (first, hidden)]

    def call(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *b: Tensor) -> Tensor:
        named = dict(zip(("b_gate_up", "b_down"), b))
        return tokenyard.expert_mlp(x, routing, weights, w1, w2, **named, **options)

    got, want = both(call, leaves, torch.randn(num_tokens, hidden))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(got, want):
        scale = max(float(theirs.abs().max()), 1.0)
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("layout", ["ENK", "EKN"])
def test_low_rank_additions(layout: str, weights_on: str, poisoned_memory: None) -> None:
    """Every gradient, of the factors too; and with recomputation."""
    num_tokens, num_experts, hidden, inner, rank = 45, 4, 24, 40, 8
    routing = tokenyard.route(torch.randint(-1, num_experts - 1, (num_tokens, 2)), num_experts)
    shapes = [(2 * inner, hidden), (hidden, inner)]
    leaves = [torch.randn(num_tokens, hidden), torch.rand(num_tokens, 2)]
    for size_out, size_in in shapes:
        weight = torch.randn(num_experts, size_out, size_in) / size_in**0.5
        leaves.append(weight if layout == "ENK" else weight.mT.contiguous())
    for size_out, size_in in shapes:
        leaves.append(torch.randn(num_experts, rank, size_in) / size_in**0.5)
        leaves.append(torch.randn(num_experts, size_out, rank) / rank**0.5)

    def call(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *factors: Tensor) -> Tensor:
        loras = {
            "lora_gate_up": tokenyard.LoRA(*factors[:2], 0.5),
            "lora_down": tokenyard.LoRA(*factors[2:], 2.0),
        }
        options: Any = {"weight_layout": layout, "weights_on": weights_on}
        recompute = layout == "EKN"
        return tokenyard.expert_mlp(
            x, routing, weights, w1, w2, **loras, **options, recompute=recompute
        )

    got, want = both(call, leaves, torch.randn(num_tokens, hidden))
    for ours, theirs in zip(got, want):
        scale = max(float(theirs.abs().max()), 1.0)
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-5, atol=1e-5)


def test_only_what_is_needed_runs() -> None:
    routing = tokenyard.route(torch.randint(4, (20, 2)), 4)
    x, weights = torch.randn(20, 24), torch.rand(20, 2)
    w1, w2 = torch.randn(4, 32, 24), torch.randn(4, 24, 16)
    x.requires_grad_()

    def run() -> None:
        tokenyard.expert_mlp(x, routing, weights, w1, w2).sum().backward()

    _, names = launched(run)
    assert "_weight_gradient_kernel" not in names and "bias_gradient_kernel" not in names


def test_no_tokens_and_nothing_routed(poisoned_memory: None) -> None:
    for ids in (torch.zeros(0, 2, dtype=torch.int64), torch.full((5, 2), -1)):
        routing = tokenyard.route(ids, 3, num_rows=8)
        leaves = [
            torch.randn(ids.shape[0], 16),
            torch.rand(ids.shape),
            torch.randn(3, 32, 16),
            torch.randn(3, 16, 16),
        ]

        def call(x: Tensor, w: Tensor, w1: Tensor, w2: Tensor, routing: Any = routing) -> Tensor:
            return tokenyard.expert_mlp(x, routing, w, w1, w2)

        got, want = both(call, leaves, torch.randn(ids.shape[0], 16))
        for ours, theirs in zip(got, want):
            assert torch.equal(ours, theirs)


def test_gathered_tokens_are_those_of_rows(poisoned_memory: None) -> None:
    """More tokens than rows."""
    ids = torch.full((90, 2), -1)
    ids[60:] = torch.tensor([0, 2])
    routing = tokenyard.route(ids, 3, num_rows=64)
    x, w1 = torch.randn(90, 24), torch.randn(3, 140, 24)
    rest = w1, None, routing.expert_offsets, routing.tokens_per_expert, True
    way = "swiglu", "concatenated", 64, True
    gathered = expert_mlp.up(x, routing.slot_of_row, 2, *rest, *way)
    rows = tokenyard.permute(x, routing)
    assert all(map(torch.equal, gathered, expert_mlp.up(rows, None, 2, *rest, *way)))
