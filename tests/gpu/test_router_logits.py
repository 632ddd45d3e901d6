"""router_logits on a GPU: fp64 at real sizes, what is kept, flags, no sync, graphs, compile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard import router_logits

pytestmark = pytest.mark.gpu
SIXTEEN = [torch.bfloat16, torch.float16]
# (T, H, E): DeepSeek-V3, Qwen3-MoE, OLMoE, gpt-oss on one token, sizes of odd tiles and strides
SHAPES = [(4096, 7168, 256), (8192, 2048, 128), (3000, 2048, 64), (1, 2880, 128), (77, 333, 19)]


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """A function that turns every later synchronisation into an error, until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@contextmanager
def flag(name: str, value: bool) -> Iterator[None]:
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, before)


def inputs_of(
    num_tokens: int, hidden: int, num_experts: int, dtype: torch.dtype, weight_dtype: Any = None
) -> list[Tensor]:
    """x, weight and bias, scaled so that logits are near 1; and the gradient of the logits."""
    x_TH = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    weight_EH = torch.randn(num_experts, hidden, device="cuda") / hidden**0.5
    bias_E = torch.randn(num_experts, device="cuda")
    grad_TE = torch.randn(num_tokens, num_experts, device="cuda")
    weight_dtype = weight_dtype or dtype
    return [x_TH, weight_EH.to(weight_dtype), bias_E.to(weight_dtype), grad_TE]


def everything(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Logits and every gradient."""
    inputs = [value.detach().requires_grad_() for value in (x, weight, bias)]
    logits_TE = router_logits(*inputs)
    return [logits_TE.detach(), *torch.autograd.grad(logits_TE, inputs, grad)]


def exactly(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight, bias, grad = (value.double() for value in (x, weight, bias, grad))
    return [x @ weight.t() + bias, grad @ weight, grad.t() @ x, grad.sum(0)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def check(inputs: list[Tensor], tolerance: float = 1e-4) -> None:
    """Logits as exact as tensor cores add in fp32 (TF32 is off by 3e-4).

    Of the gradients, few differ from the exact ones, rounded once.
    """
    got, want = everything(*inputs), exactly(*inputs)
    assert got[0].dtype == torch.float32 and error(got[0], want[0]) < tolerance
    for ours, exact, value in zip(got[1:], want[1:], inputs):
        assert ours.dtype == value.dtype and ours.is_contiguous()
        if ours.dtype == torch.float32:
            assert error(ours, exact) < tolerance
        else:
            rounded = exact.to(ours.dtype)
            assert error(ours, rounded) < 1e-3
            wrong = int((ours != rounded).sum())
            assert wrong <= 2 + 0.05 * rounded.numel()  # of one bf16 half, more than a third


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_fp64(
    shape: tuple[int, int, int], dtype: torch.dtype, poisoned_memory: None
) -> None:
    check(inputs_of(*shape, dtype))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_mixed_dtypes(dtype: torch.dtype, poisoned_memory: None) -> None:
    check(inputs_of(700, 512, 60, dtype, torch.float32))
    check(inputs_of(700, 512, 60, torch.float32, dtype))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("power", [-60, -24, 24, 60])
def test_gradients_of_any_size(dtype: torch.dtype, power: int) -> None:
    """As small and as large as a loss scale makes them, rows of one call far apart."""
    if dtype == torch.float16:
        power = max(-10, min(power, 5))  # so that the gradients are normal fp16 numbers
    x_TH, weight_EH, bias_E, grad_TE = inputs_of(500, 256, 64, dtype)
    grad_TE *= 2.0**power
    if dtype == torch.bfloat16:
        grad_TE[::2] *= 2.0**-40
    got = everything(x_TH, weight_EH, bias_E, grad_TE)
    for ours, exact in zip(got[1:], exactly(x_TH, weight_EH, bias_E, grad_TE)[1:]):
        if exact.dim() == 2:
            ours, exact = ours.double(), exact.double()
            size = exact.norm(dim=1)
            assert ((ours - exact).norm(dim=1) <= 2 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ],
)
def test_flags_change_nothing(dtype: torch.dtype, name: str) -> None:
    """A sum long enough to be split, as few tokens are."""
    for inputs in (inputs_of(16, 7168, 256, dtype), inputs_of(8192, 1024, 8, dtype)):
        for value in (False, True):
            with flag(name, value):
                check(inputs)


def test_tf32_leaves_bf16_alone() -> None:
    inputs = inputs_of(2000, 2048, 64, torch.bfloat16)
    want = everything(*inputs)
    with flag("allow_tf32", True):
        assert all(map(torch.equal, everything(*inputs), want))


def test_autocast_changes_nothing() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        inputs = inputs_of(300, 512, 32, dtype)
        want = everything(*inputs)
        with torch.autocast("cuda", torch.float16):
            assert all(map(torch.equal, everything(*inputs), want))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_no_tokens(dtype: torch.dtype, poisoned_memory: None) -> None:
    x_TH, weight_EH, bias_E, grad_TE = inputs_of(0, 64, 8, dtype)
    logits_TE, d_x, d_weight, d_bias = everything(x_TH, weight_EH, bias_E, grad_TE)
    assert logits_TE.shape == (0, 8) and d_x.shape == (0, 64)
    assert torch.equal(d_weight, torch.zeros_like(weight_EH))
    assert torch.equal(d_bias, torch.zeros_like(bias_E))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_any_strides(dtype: torch.dtype) -> None:
    x_TH, weight_EH, bias_E, grad_TE = inputs_of(200, 96, 24, dtype)
    want = everything(x_TH, weight_EH, bias_E, grad_TE)
    strided = [value.repeat_interleave(2, dim=0)[::2] for value in (x_TH, weight_EH)]
    transposed = [value.t().contiguous().t() for value in (x_TH, weight_EH)]
    for x, weight in (strided, transposed):
        for grad in (grad_TE, grad_TE.t().contiguous().t(), torch.stack([grad_TE] * 2, -1)[..., 0]):
            for ours, theirs in zip(everything(x, weight, bias_E, grad), want):
                assert ours.is_contiguous() and error(ours, theirs) < 1e-3
    expanded_TE = grad_TE[:1].expand(200, 24)
    got = everything(x_TH, weight_EH, bias_E, expanded_TE)
    for ours, theirs in zip(got, everything(x_TH, weight_EH, bias_E, expanded_TE.contiguous())):
        assert error(ours, theirs) < 1e-3


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
def test_what_is_kept(dtype: torch.dtype) -> None:
    """Between forward and backward nothing but the logits; in the forward nothing beside them."""
    inputs = [value.requires_grad_() for value in inputs_of(8192, 2048, 128, dtype)[:2]]
    router_logits(*inputs)  # the GEMM's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits_TE = router_logits(*inputs)
    assert torch.cuda.memory_allocated() - before == logits_TE.nbytes
    assert torch.cuda.max_memory_allocated() - before == logits_TE.nbytes
    router = tokenyard.nn.Router(2048, 128, 8, device="cuda", dtype=dtype)
    before = torch.cuda.memory_allocated()
    out = router(inputs[0])
    kept = torch.cuda.memory_allocated() - before
    assert kept < 8 * out.router_logits.nbytes < inputs[0].numel() * 4


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 20, 3000])
def test_no_sync_and_the_same_bits_again(
    num_tokens: int, dtype: torch.dtype, no_sync: Callable[[], None]
) -> None:
    inputs = inputs_of(num_tokens, 512, 64, dtype)
    want = everything(*inputs)
    no_sync()
    got = everything(*inputs)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("num_tokens", [20, 3000])
def test_graph_replays_with_other_values(num_tokens: int, dtype: torch.dtype) -> None:
    inputs, other = (inputs_of(num_tokens, 512, 64, dtype) for _ in "ab")
    want = everything(*other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        everything(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = everything(*inputs)
    for static, new in zip(inputs, other):
        static.copy_(new)
    graph.replay()
    for ours, theirs in zip(got, want):
        assert error(ours, theirs) < 1e-3  # the GEMM's workspace may differ in a capture


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_compiled_in_one_graph(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(router_logits, fullgraph=True, dynamic=True)
    whole = inputs_of(1000, 512, 32, dtype)
    for num_tokens in (1000, 999):
        x_TH, weight_EH, bias_E, grad_TE = (whole[0][:num_tokens], *whole[1:3], whole[3])
        inputs = [value.detach().requires_grad_() for value in (x_TH, weight_EH, bias_E)]
        got, want = compiled(*inputs), router_logits(*inputs)
        assert torch.equal(got, want)
        grad_TE = grad_TE[:num_tokens]
        for ours, theirs in zip(
            torch.autograd.grad(got, inputs, grad_TE), torch.autograd.grad(want, inputs, grad_TE)
        ):
            assert torch.equal(ours, theirs)


def test_on_another_stream() -> None:
    inputs = inputs_of(3000, 1024, 64, torch.bfloat16)
    want = everything(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = everything(*inputs)
    stream.synchronize()
    assert all(error(ours, theirs) < 1e-3 for ours, theirs in zip(got, want))
