"""grouped_gemm on a GPU, at real sizes: fp64 on samples, one set of bits, streams, graphs, no sync."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard import Routing
from tokenyard.kernels import grouped_gemm as kernels

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """A function that turns every later synchronisation into an error, until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def routing_of(num_tokens: int, num_experts: int, top_k: int, kind: str = "random") -> Routing:
    scores_TE = torch.rand(num_tokens, num_experts, device="cuda")
    if kind == "zipf":
        scores_TE = scores_TE.log() / torch.arange(1, num_experts + 1, device="cuda").float() ** -1
    if kind == "one":
        scores_TE[:, 1] += 2
    return tokenyard.route(scores_TE.topk(top_k, dim=1).indices, num_experts)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def weight_of(routing: Routing, size_in: int, size_out: int, layout: str, dtype: Any) -> Tensor:
    sizes = (size_out, size_in) if layout == "ENK" else (size_in, size_out)
    return (randn(routing.num_experts, *sizes, dtype=torch.float32) / size_in**0.5).to(dtype)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-9))


def check(routing: Routing, size_in: int, size_out: int, layout: Any, dtype: torch.dtype) -> None:
    """Forward and gradients against fp64, on the rows and experts at both ends and some between."""
    rows_RK = randn(routing.num_rows, size_in, dtype=dtype).requires_grad_()
    weight = weight_of(routing, size_in, size_out, layout, dtype).requires_grad_()
    bias_EN = randn(routing.num_experts, size_out, dtype=dtype).requires_grad_()
    out_RN = tokenyard.grouped_gemm(rows_RK, weight, routing, layout=layout, bias=bias_EN)
    grad_RN = randn(*out_RN.shape, dtype=dtype)
    d_rows, d_weight, d_bias = torch.autograd.grad(out_RN, (rows_RK, weight, bias_EN), grad_RN)
    offsets = routing.expert_offsets.tolist()
    experts = {0, 1, routing.num_experts // 2, routing.num_experts - 1}
    tolerance = TOLERANCE[dtype]
    for expert in experts:
        every = slice(offsets[expert], offsets[expert + 1])
        some = slice(max(every.stop - 300, every.start), every.stop)
        with torch.no_grad():
            matrix = weight[expert] if layout == "ENK" else weight[expert].t()
            want = rows_RK[some].double() @ matrix.double().t() + bias_EN[expert].double()
            assert error(out_RN[some], want) < tolerance
            assert error(d_rows[some], grad_RN[some].double() @ matrix.double()) < tolerance
            want = grad_RN[every].double().t() @ rows_RK[every].double()
            want = want if layout == "ENK" else want.t()
            assert error(d_weight[expert], want) < tolerance
            assert error(d_bias[expert], grad_RN[every].double().sum(0)) < tolerance
            if every.start == every.stop:
                assert not d_weight[expert].any() and not d_bias[expert].any()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize(
    "shape", [(4096, 64, 8, 2048, 1024), (300, 60, 4, 1408, 2048), (2000, 6, 2, 33, 20)], ids=str
)
def test_against_fp64(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, poisoned_memory: None
) -> None:
    num_tokens, num_experts, top_k, size_in, size_out = shape
    check(routing_of(num_tokens, num_experts, top_k), size_in, size_out, layout, dtype)


@pytest.mark.parametrize("kind", ["zipf", "one"])
def test_uneven_routing(kind: str, poisoned_memory: None) -> None:
    check(routing_of(8192, 128, 8, kind), 2048, 768, "ENK", torch.bfloat16)


def test_weights_past_int32() -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < 60 << 30:
        pytest.skip(f"needs 60 GiB of GPU memory, {free >> 30} GiB are free")
    check(routing_of(2048, 256, 8), 7168, 4096, "ENK", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Alone, among few and among many: every tile adds in the same order."""
    num_experts, size_in, size_out = 64, 2048, 1536
    ids_TK = torch.rand(8192, num_experts, device="cuda").topk(4).indices
    x_TH = randn(8192, size_in, dtype=dtype)
    routing = tokenyard.route(ids_TK, num_experts)
    for layout in ("ENK", "EKN"):
        weight = weight_of(routing, size_in, size_out, layout, dtype)

        def outputs(tokens: Tensor, layout: str = layout, weight: Tensor = weight) -> Tensor:
            part = tokenyard.route(ids_TK[tokens], num_experts)
            rows = tokenyard.permute(x_TH[tokens], part)
            out_RN = tokenyard.grouped_gemm(rows, weight, part, layout=layout)
            return out_RN[part.row_of_slot.long()]

        whole = outputs(torch.arange(8192, device="cuda"))
        for num_tokens in (1, 7, 200, 500, 1000, 4000):
            some = torch.randperm(8192, device="cuda")[:num_tokens]
            assert torch.equal(outputs(some), whole[some])


def everything(ids_TK: Tensor, rows_RK: Tensor, weight: Tensor, grad_RN: Tensor) -> list[Tensor]:
    routing = tokenyard.route(ids_TK, weight.shape[0])
    rows_RK, weight = rows_RK.detach().requires_grad_(), weight.detach().requires_grad_()
    out_RN = tokenyard.grouped_gemm(rows_RK, weight, routing, layout="ENK")
    return [out_RN.detach(), *torch.autograd.grad(out_RN, (rows_RK, weight), grad_RN)]


def inputs_for_everything(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_TK = torch.rand(num_tokens, 32, device="cuda").topk(4).indices
    weight = randn(32, 512, 256, dtype=torch.bfloat16)
    rows_RK = randn(num_tokens * 4, 256, dtype=torch.bfloat16)
    return ids_TK, rows_RK, weight, randn(num_tokens * 4, 512, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [20, 3000])
def test_no_sync_and_the_same_bits_again(num_tokens: int, no_sync: Callable[[], None]) -> None:
    inputs = inputs_for_everything(num_tokens)
    want = everything(*inputs)
    no_sync()
    got = everything(*inputs)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("num_tokens", [20, 3000])
def test_graph_replays_with_another_routing(num_tokens: int) -> None:
    inputs, other = inputs_for_everything(num_tokens), inputs_for_everything(num_tokens)
    want = everything(*other)
    everything(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything(*inputs)
    for static, new in zip(inputs, other):
        static.copy_(new)
    graph.replay()
    assert all(map(torch.equal, got, want))


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=False, dynamic=True)
    for num_tokens in (3000, 3001):
        inputs = inputs_for_everything(num_tokens)
        assert all(map(torch.equal, compiled(*inputs), everything(*inputs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_adds_to_a_buffer(dtype: torch.dtype) -> None:
    routing = routing_of(3000, 32, 4)
    a, b = (randn(routing.num_rows, size, dtype=torch.bfloat16) for size in (512, 384))
    start = randn(32, 512, 384, dtype=dtype)
    got, alone = start.clone(), torch.empty(32, 512, 384, device="cuda")
    groups = routing.expert_offsets, routing.tokens_per_expert
    kernels.weight_gradient(a, b, *groups, got, True)
    kernels.weight_gradient(a, b, *groups, alone, False)
    assert torch.equal(got, (start.float() + alone).to(dtype))
