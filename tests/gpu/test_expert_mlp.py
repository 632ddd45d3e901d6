"""expert_mlp on a GPU: fp64, the definition at real sizes, what is kept, streams, graphs, no sync."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard import Routing, use

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """A function that turns every later synchronisation into an error, until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def leaves_of(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    options: dict[str, Any],
    *,
    biases: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """x, routing weights, matrices and biases, scaled so that every value is near 1."""
    first = inner if options.get("activation") in ("silu", "gelu", "relu2") else 2 * inner
    shapes = [(num_experts, first, hidden), (num_experts, hidden, inner)]
    matrices = [torch.randn(shape, device="cuda") / shape[2] ** 0.5 for shape in shapes]
    if options.get("weight_layout") == "EKN":
        matrices = [matrix.mT.contiguous() for matrix in matrices]
    if biases:
        matrices += [torch.randn(num_experts, size, device="cuda") for size in (first, hidden)]
    weights = torch.rand(num_tokens, top_k, device="cuda")
    x = torch.randn(num_tokens, hidden, device="cuda", dtype=dtype)
    return [x, weights, *(matrix.to(dtype) for matrix in matrices)]


def call(leaves: list[Tensor], routing: Routing, options: dict[str, Any]) -> Tensor:
    x, weights, w1, w2, *biases = leaves
    named = dict(zip(("b_gate_up", "b_down"), biases))
    return tokenyard.expert_mlp(x, routing, weights, w1, w2, **named, **options)


def everything(
    leaves: list[Tensor], ids_TK: Tensor, grad_TH: Tensor, **options: Any
) -> list[Tensor]:
    """Output and every gradient."""
    routing = tokenyard.route(ids_TK, leaves[2].shape[0])
    inputs = [leaf.detach().requires_grad_() for leaf in leaves]
    out = call(inputs, routing, options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_TH.to(out.dtype))]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


OPTIONS = [
    {},
    {"gate_up_layout": "interleaved", "weight_layout": "EKN", "activation": "clamped_swiglu"},
    {"activation": "geglu", "recompute": True, "reduction": "expert"},
    {"activation": "relu2", "gate_up_layout": "interleaved"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [9, 700])
def test_against_fp64(
    num_tokens: int, dtype: torch.dtype, options: dict[str, Any], poisoned_memory: None
) -> None:
    """Output and every gradient, with an empty expert, dropped choices, and sizes of odd tiles."""
    leaves = leaves_of(num_tokens, 12, 3, 264, 136, options, dtype=dtype)
    ids = torch.rand(num_tokens, 11, device="cuda").topk(3).indices
    ids[2, 1] = -1
    ids[4] = -1
    grad = torch.randn(num_tokens, 264, device="cuda", dtype=dtype)
    got = everything(leaves, ids, grad, **options)
    with use("reference"):
        want = everything([leaf.double() for leaf in leaves], ids, grad, **options)
    tolerance = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 2e-6}[dtype]
    for ours, theirs in zip(got, want):
        assert error(ours, theirs) < tolerance


@pytest.mark.parametrize("kind", ["random", "zipf", "one"])
@pytest.mark.parametrize(
    "shape",
    [(4096, 128, 8, 2048, 768), (4096, 128, 8, 1536, 256), (2048, 8, 2, 4096, 3584)],
    ids=str,
)
def test_against_the_definition(shape: tuple[int, ...], kind: str, poisoned_memory: None) -> None:
    num_tokens, num_experts, top_k, hidden, inner = shape
    scores = torch.rand(num_tokens, num_experts, device="cuda")
    if kind == "zipf":
        scores = scores.log() * torch.arange(1, num_experts + 1, device="cuda")
    if kind == "one":
        scores[:, 1] += 2
    ids = scores.topk(top_k).indices
    leaves = leaves_of(num_tokens, num_experts, top_k, hidden, inner, {}, biases=False)
    grad = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
    got = everything(leaves, ids, grad)
    with use("reference"):
        want = everything(leaves, ids, grad)
    for ours, theirs in zip(got, want):
        assert error(ours, theirs) < 1e-2


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept(recompute: bool) -> None:
    """Between forward and backward: the pre-activation, or nothing."""
    leaves = leaves_of(4096, 32, 4, 1024, 512, {}, biases=False)
    inputs = [leaf.requires_grad_() for leaf in leaves]
    routing = tokenyard.route(torch.rand(4096, 32, device="cuda").topk(4).indices, 32)
    call(inputs, routing, {})
    before = torch.cuda.memory_allocated()
    out = call(inputs, routing, {"recompute": recompute})
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    assert kept == (0 if recompute else 4096 * 4 * 1024 * 2)


@pytest.mark.parametrize("num_tokens", [1, 20, 3000])
def test_no_sync_and_the_same_bits_again(num_tokens: int, no_sync: Callable[[], None]) -> None:
    leaves = leaves_of(num_tokens, 32, 4, 512, 256, {})
    ids = torch.rand(num_tokens, 32, device="cuda").topk(4).indices
    grad = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
    want = everything(leaves, ids, grad)
    no_sync()
    got = everything(leaves, ids, grad)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("num_tokens", [20, 3000])
def test_graph_replays_with_another_routing(num_tokens: int) -> None:
    leaves = leaves_of(num_tokens, 32, 4, 512, 256, {})
    ids, other = (torch.rand(num_tokens, 32, device="cuda").topk(4).indices for _ in "ab")
    grad = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
    want = everything(leaves, other, grad)
    everything(leaves, ids, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything(leaves, ids, grad)
    ids.copy_(other)
    graph.replay()
    assert all(map(torch.equal, got, want))


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    leaves = leaves_of(1000, 32, 4, 512, 256, {})

    @torch.compile(fullgraph=True, dynamic=True)
    def compiled(leaves: list[Tensor], ids: Tensor) -> Tensor:
        return call(leaves, tokenyard.route(ids, 32), {})

    inputs = [leaf.requires_grad_() for leaf in leaves]
    for num_tokens in (1000, 999):
        ids = torch.rand(num_tokens, 32, device="cuda").topk(4).indices
        some = [inputs[0][:num_tokens], inputs[1][:num_tokens], *inputs[2:]]
        grad = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
        got = compiled(some, ids)
        want = call(some, tokenyard.route(ids, 32), {})
        assert torch.equal(got, want)
        for ours, theirs in zip(
            torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad)
        ):
            assert torch.equal(ours, theirs)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    leaves = leaves_of(4096, 64, 4, 1024, 512, {}, biases=False)
    ids = torch.rand(4096, 64, device="cuda").topk(4).indices
    whole = call(leaves, tokenyard.route(ids, 64), {})
    for num_tokens in (1, 7, 200, 1000):
        some = torch.randperm(4096, device="cuda")[:num_tokens]
        part = [leaves[0][some], leaves[1][some], *leaves[2:]]
        assert torch.equal(call(part, tokenyard.route(ids[some], 64), {}), whole[some])


def lora_leaves(num_experts: int, hidden: int, inner: int, rank: int) -> list[Tensor]:
    """a and b for both matrices."""
    shapes = [(rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank)]
    return [
        (torch.randn(num_experts, *shape, device="cuda") / shape[1] ** 0.5).bfloat16()
        for shape in shapes
    ]


def call_with_lora(leaves: list[Tensor], ids_TK: Tensor, weights_on: Any) -> Tensor:
    x, weights, w1, w2, *factors = leaves
    loras = {
        "lora_gate_up": tokenyard.LoRA(factors[0], factors[1], 0.5),
        "lora_down": tokenyard.LoRA(factors[2], factors[3], 2.0),
    }
    routing = tokenyard.route(ids_TK, w1.shape[0])
    return tokenyard.expert_mlp(x, routing, weights, w1, w2, **loras, weights_on=weights_on)


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("num_tokens", [9, 3000])
def test_low_rank_additions(
    num_tokens: int, weights_on: str, no_sync: Callable[[], None], poisoned_memory: None
) -> None:
    """Against fp64; without a synchronisation; in a graph."""
    leaves = leaves_of(num_tokens, 16, 4, 512, 256, {}, biases=False)
    leaves += lora_leaves(16, 512, 256, 8)
    ids = torch.rand(num_tokens, 16, device="cuda").topk(4).indices
    grad = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)

    def step(leaves: list[Tensor]) -> list[Tensor]:
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        out = call_with_lora(inputs, ids, weights_on)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    got = step(leaves)
    want = step([leaf.double() for leaf in leaves])
    for ours, exact in zip(got, want):
        assert error(ours, exact) < 2e-2
    no_sync()
    again = step(leaves)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, again, got))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(leaves)
    graph.replay()
    assert all(map(torch.equal, replayed, got))


def test_frozen_matrices_cost_no_memory() -> None:
    leaves = leaves_of(2048, 32, 4, 1024, 512, {}, biases=False)
    factors = [leaf.requires_grad_() for leaf in lora_leaves(32, 1024, 512, 8)]
    ids = torch.rand(2048, 32, device="cuda").topk(4).indices
    out = call_with_lora([*leaves, *factors], ids, "output")
    before = torch.cuda.memory_allocated()
    out.sum().backward()
    grown = torch.cuda.memory_allocated() - before + 2048 * 4 * 1024 * 2  # z is gone
    assert grown <= sum(factor.nbytes for factor in factors) + (1 << 20)
    assert all(leaf.grad is None for leaf in leaves)


def test_more_elements_than_int32_counts() -> None:
    """T 131072, K 8: 2^31 elements of z and more; some tokens against the definition."""
    num_tokens, hidden, inner = 131072, 1024, 1280
    leaves = leaves_of(num_tokens, 64, 8, hidden, inner, {}, biases=False)
    ids = torch.rand(num_tokens, 64, device="cuda").topk(8).indices
    grad = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
    out, d_x, d_weights, _, _ = everything(leaves, ids, grad)
    some = torch.tensor([0, 1, 65536, num_tokens - 2, num_tokens - 1], device="cuda")
    part = [leaves[0][some], leaves[1][some], *leaves[2:]]
    with use("reference"):
        want = everything(part, ids[some], grad[some])
    for ours, theirs in zip((out, d_x, d_weights), want):
        assert error(ours[some], theirs) < 1e-2
