"""`tokenyard.activation` against formulas written out here, and at its edges."""

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tokenyard import ArgumentError, activation, activation_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LAYOUTS = ("concatenated", "interleaved")


def silu(g: Tensor) -> Tensor:
    return g / (1 + torch.exp(-g))


def gelu(g: Tensor) -> Tensor:
    return g * 0.5 * torch.erfc(-g / math.sqrt(2))


def gelu_tanh(g: Tensor) -> Tensor:
    return g * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g))


def relu(g: Tensor) -> Tensor:
    return torch.where(g > 0, g, 0)


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: silu(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "reglu": lambda gate, up: relu(gate) * up,
    "clamped_swiglu": lambda gate, up: gpt_oss(
        torch.where(gate > 7, 7, gate),
        torch.where(up > 7, 7, torch.where(up < -7, -7, up)),
    ),
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": lambda g: relu(g) * relu(g),
}
CASES = [(kind, layout) for kind in GATED for layout in LAYOUTS]
CASES += [(kind, "concatenated") for kind in UNGATED]
kinds = pytest.mark.parametrize(("kind", "layout"), CASES)


def gate_up_of(rows: int, size: int, kind: str, layout: str, dtype: torch.dtype) -> Tensor:
    """[R,2I] or [R,I], with values on both sides of the clamps."""
    return 5 * torch.randn(rows, size if kind in UNGATED else 2 * size, dtype=dtype)


def formula(x_RN: Tensor, kind: str, layout: str) -> Tensor:
    if kind in UNGATED:
        return UNGATED[kind](x_RN)
    if layout == "interleaved":
        x_RI2 = x_RN.unflatten(1, (-1, 2))
        return GATED[kind](x_RI2[:, :, 0], x_RI2[:, :, 1])
    x_R2I = x_RN.unflatten(1, (2, -1))
    return GATED[kind](x_R2I[:, 0], x_R2I[:, 1])


@kinds
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 1408), (0, 8)])
def test_values_and_gradients(kind: Any, layout: Any, shape: tuple[int, int]) -> None:
    x_RN = gate_up_of(*shape, kind, layout, torch.float64).requires_grad_()
    want_RI = formula(x_RN, kind, layout)
    d_RI = torch.randn_like(want_RI)
    (d_want_RN,) = torch.autograd.grad(want_RI, x_RN, d_RI)
    for function in (activation, activation_reference):
        out_RI = function(x_RN, kind, layout)
        (d_x_RN,) = torch.autograd.grad(out_RI, x_RN, d_RI)
        torch.testing.assert_close(out_RI, want_RI, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(d_x_RN, d_want_RN, rtol=1e-11, atol=1e-11)
    out_RI = activation(x_RN.detach().float(), kind, layout)
    assert out_RI.dtype == torch.float32 and out_RI.shape == shape
    torch.testing.assert_close(out_RI, want_RI.float(), rtol=1e-5, atol=1e-5)


def test_same_as_torch() -> None:
    x_RN = 3 * torch.randn(7, 24)
    gate_RI, up_RI = x_RN.chunk(2, dim=1)
    cases = [
        ("swiglu", F.silu(gate_RI) * up_RI),
        ("geglu", F.gelu(gate_RI) * up_RI),
        ("geglu_tanh", F.gelu(gate_RI, approximate="tanh") * up_RI),
        ("reglu", F.relu(gate_RI) * up_RI),
        ("silu", F.silu(x_RN)),
        ("gelu", F.gelu(x_RN)),
        ("gelu_tanh", F.gelu(x_RN, approximate="tanh")),
        ("relu", F.relu(x_RN)),
        ("relu2", F.relu(x_RN).square()),
    ]
    for kind, want in cases:
        torch.testing.assert_close(activation(x_RN, kind), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt_oss_at_and_beyond_its_limits(layout: Any) -> None:
    """Beyond a limit the value is that at the limit and the gradient is zero; at it, it is whole."""
    steps = [-1e4, -7.5, -7.0, -1.0, 0.0, 1.0, 7.0, 7.5, 1e4]
    gate_R, up_R = torch.cartesian_prod(*2 * [torch.tensor(steps, dtype=torch.float64)]).unbind(1)
    x_RN = torch.stack([gate_R, up_R], dim=1).requires_grad_()
    out_R1 = activation(x_RN, "clamped_swiglu", layout)
    d_R1 = torch.randn_like(out_R1)
    (d_RN,) = torch.autograd.grad(out_R1, x_RN, d_R1)
    for r, (gate, up) in enumerate(zip(gate_R.tolist(), up_R.tolist())):
        g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
        sigmoid = 1 / (1 + math.exp(-1.702 * g)) if g > -400 else 0.0
        slope = sigmoid + 1.702 * g * sigmoid * (1 - sigmoid) if gate <= 7 else 0.0
        d = float(d_R1[r])
        assert math.isclose(float(out_R1[r].detach()), g * sigmoid * (u + 1), abs_tol=1e-14)
        assert math.isclose(float(d_RN[r, 0]), d * (u + 1) * slope, rel_tol=1e-9, abs_tol=1e-14)
        d_up = d * g * sigmoid if abs(up) <= 7 else 0.0
        assert math.isclose(float(d_RN[r, 1]), d_up, rel_tol=1e-9, abs_tol=1e-14)


def test_gate_of_gpt_oss_in_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.20")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    class Limits:
        alpha, limit = 1.702, 7.0

    x_RN = 6 * torch.randn(9, 16)
    want_RI = GptOssExperts._apply_gate(Limits(), x_RN)
    torch.testing.assert_close(activation(x_RN, "clamped_swiglu", "interleaved"), want_RI)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once(kind: Any, layout: Any, dtype: torch.dtype) -> None:
    """Within half a unit in the last place, which two roundings exceed; gradients too."""
    x_RN = gate_up_of(200, 50, kind, layout, torch.float32).to(dtype).requires_grad_()
    exact_RN = x_RN.detach().double().requires_grad_()
    out_RI, exact_RI = activation(x_RN, kind, layout), formula(exact_RN, kind, layout)
    d_RI = torch.randn(out_RI.shape).to(dtype)
    (d_x_RN,) = torch.autograd.grad(out_RI, x_RN, d_RI)
    (d_exact_RN,) = torch.autograd.grad(exact_RI, exact_RN, d_RI.double())
    for got, want in ((out_RI, exact_RI), (d_x_RN, d_exact_RN)):
        half = 0.5 * torch.finfo(dtype).eps * want.abs() + 0.5 * torch.finfo(dtype).smallest_normal
        assert got.dtype == dtype
        # fp32 itself is off by about 1e-6 of the factors, which are at most about 20 each
        assert ((got.double() - want).abs() <= half * 1.001 + 2e-5).all()


@kinds
def test_large_values_neither_overflow_nor_vanish(kind: Any, layout: Any) -> None:
    size = 2 if kind in UNGATED else 4
    for value in (-88.0, -200.0, -1e4, 88.0, 200.0):
        x_RN = torch.full((3, size), value, requires_grad=True)
        out_RI = activation(x_RN, kind, layout)
        out_RI.backward(torch.ones_like(out_RI))
        assert x_RN.grad is not None and x_RN.grad.isfinite().all() and out_RI.isfinite().all()
        want_RI = formula(x_RN.detach().double(), kind, layout)
        torch.testing.assert_close(out_RI.double(), want_RI, rtol=1e-5, atol=1e-30)


@kinds
def test_strides_and_expanded_gradients(kind: Any, layout: Any) -> None:
    """A chunk of a wider tensor, a transposed one, every other row; gradients of stride 0."""
    plain_RN = gate_up_of(6, 8, kind, layout, torch.float32)
    size = plain_RN.shape[1]
    views = [
        torch.cat([plain_RN + 1, plain_RN], dim=1)[:, size:],
        plain_RN.t().contiguous().t(),
        plain_RN.repeat_interleave(2, dim=0)[::2],
        torch.cat([torch.zeros(1), plain_RN.flatten()])[1:].view(6, size),
    ]
    close = {"rtol": 1e-5, "atol": 1e-5}
    plain_RN.requires_grad_()
    want_RI = formula(plain_RN, kind, layout)
    d_transposed_RI = torch.randn(8, 6).t()
    for view_RN, d_RI in product(views, (torch.ones(()).expand(6, 8), d_transposed_RI)):
        out_RI = activation(view_RN.requires_grad_(), kind, layout)
        torch.testing.assert_close(out_RI, want_RI, **close)
        (got_RN,) = torch.autograd.grad(out_RI, view_RN, d_RI)
        (want_RN,) = torch.autograd.grad(want_RI, plain_RN, d_RI, retain_graph=True)
        torch.testing.assert_close(got_RN, want_RN, **close)


@kinds
def test_gradcheck_and_opcheck(kind: Any, layout: Any) -> None:
    x_RN = gate_up_of(3, 4, kind, layout, torch.float64) + 0.01
    x_RN = x_RN.where((x_RN.abs() - 7).abs() > 1e-3, 0.5).requires_grad_()
    for function in (activation, activation_reference):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, kind, layout), (x_RN,))
    torch.library.opcheck(torch.ops.tokenyard.activation, (x_RN, kind, layout))


@kinds
def test_every_element_is_written(kind: Any, layout: Any, poisoned_memory: None) -> None:
    for dtype in DTYPES:
        x_RN = gate_up_of(5, 3, kind, layout, torch.float32).to(dtype).requires_grad_()
        out_RI = activation(x_RN, kind, layout)
        out_RI.backward(torch.ones_like(out_RI))
        assert not out_RI.isnan().any()
        assert x_RN.grad is not None and not x_RN.grad.isnan().any()


@pytest.mark.parametrize(("kind", "layout"), [("swiglu", "interleaved"), ("relu2", "concatenated")])
def test_compile_does_not_depend_on_the_number_of_rows(kind: Any, layout: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(activation, fullgraph=True, backend=counter)
    for rows in (3, 8, 21):
        x_RN = gate_up_of(rows, 5, kind, layout, torch.float32).requires_grad_()
        torch._dynamo.mark_dynamic(x_RN, 0)
        out_RI, want_RI = compiled(x_RN, kind, layout), activation(x_RN, kind, layout)
        assert torch.equal(out_RI, want_RI)
        d_RI = torch.randn_like(out_RI)
        got, want = (torch.autograd.grad(y_RI, x_RN, d_RI)[0] for y_RI in (out_RI, want_RI))
        assert torch.equal(got, want)
    assert counter.frame_count == 1


BAD: list[tuple[str, tuple[Any, ...]]] = [
    ("gate_up", (torch.zeros(4),)),
    ("gate_up", (torch.zeros(4, 2, dtype=torch.int32),)),
    ("gate_up", ([[1.0, 2.0]],)),
    ("gate_up.shape[1]", (torch.zeros(4, 3),)),
    ("gate_up.shape[1]", (torch.zeros(4, 3), "clamped_swiglu", "interleaved")),
    ("kind", (torch.zeros(4, 2), "swish")),
    ("layout", (torch.zeros(4, 2), "swiglu", "packed")),
]


@pytest.mark.parametrize(("argument", "args"), BAD)
def test_bad_argument(argument: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"tokenyard.activation: `{argument}`")):
        activation(*args)


def test_an_odd_width_is_fine_without_a_gate() -> None:
    x_RI = torch.randn(2, 3)
    assert torch.equal(activation(x_RI, "relu"), x_RI.clamp(min=0))
