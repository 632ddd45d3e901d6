"""Every operator by both of its ways (eager function, registered op), in every mode of autograd."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import CALLS, Call, assert_same_bits, random_case
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tokenyard
from tokenyard import Routing
from tokenyard.registration import Operator


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.fixture(params=["eager", "registered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "registered":
        monkeypatch.setattr(Operator, "__call__", lambda self, *args: self.registered(*args))
    yield request.param


class Operators(TorchDispatchMode):
    """The ops of this package that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "tokenyard":
            self.seen.append(func.name())
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def make(call: Call) -> tuple[Routing, list[Tensor]]:
    routing = random_case(9, 3, 2, row_alignment=4).route()
    return routing, call.inputs(routing)


def gradients(call: Any, routing: Routing, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(call(routing, *inputs), inputs, grad))


@pytest.mark.usefixtures("way")
def test_value_and_gradient_equal_the_definition(call: Call) -> None:
    routing, inputs = make(call)
    out, want = call(routing, *inputs), call.reference(routing, *inputs)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(want, inputs, grad)
    for got, expected in zip(torch.autograd.grad(out, inputs, grad), wanted):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("way")
def test_gradients_of_any_strides(call: Call) -> None:
    routing, inputs = make(call)
    out = call(routing, *inputs)
    one = torch.ones((), dtype=out.dtype)
    contiguous = torch.randn_like(out)
    transposed = contiguous.t().contiguous().t()
    strided = torch.stack([contiguous, contiguous], -1)[..., 0]
    for grad in (one.expand(out.shape), contiguous[:1].expand(out.shape), transposed, strided):
        got = gradients(call, routing, inputs, grad)
        want = gradients(call, routing, inputs, grad.clone(memory_format=torch.contiguous_format))
        for first, second in zip(got, want):
            torch.testing.assert_close(first, second)


@pytest.mark.usefixtures("way")
def test_retain_graph(call: Call) -> None:
    routing, inputs = make(call)
    out = call(routing, *inputs)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad)
    for one, two in zip(first, second):
        assert_same_bits(one, two)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("of_grad", [False, True])
def test_second_order_is_right_or_refused(call: Call, way: str, of_grad: bool) -> None:
    """Other paths reach the inputs too, so that a missing term would go unnoticed."""
    routing, inputs = make(call)

    def second_order(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(routing, *(value**2 for value in inputs))
        torch.manual_seed(0)
        grad = torch.randn_like(out).requires_grad_(of_grad)
        first = torch.autograd.grad(out, inputs, grad, create_graph=True)
        penalty = sum((g**2).sum() for g in first) + sum((value**2).sum() for value in inputs)
        leaves = [*inputs, grad] if of_grad else inputs
        if of_grad:
            penalty = penalty + grad.sum()
        return list(torch.autograd.grad(penalty, leaves))

    try:
        results = second_order(call)
    except RuntimeError as error:
        assert re.search("differentiate twice|no autograd formula", str(error))
        return
    for got, want in zip(results, second_order(call.reference)):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("way")
def test_activation_checkpointing(call: Call) -> None:
    routing, inputs = make(call)
    for reentrant in (False, True):
        out = checkpoint(call, routing, *inputs, use_reentrant=reentrant)
        grad = torch.randn_like(out)
        for value in inputs:
            value.grad = None
        out.backward(grad)
        want = call(routing, *inputs)
        assert_same_bits(out, want)
        for value, wanted in zip(inputs, torch.autograd.grad(want, inputs, grad)):
            assert value.grad is not None
            assert_same_bits(value.grad, wanted)


def test_func_grad_is_right_or_refused(call: Call) -> None:
    routing, inputs = make(call)
    plain = tuple(value.detach() for value in inputs)
    numbers = tuple(range(len(inputs)))

    def first(function: Callable[..., Tensor]) -> Any:
        return torch.func.grad(lambda *v: function(routing, *v).square().sum(), argnums=numbers)

    def second(function: Callable[..., Tensor]) -> Any:
        def penalty(*values: Tensor) -> Tensor:
            return sum((g**2).sum() for g in first(function)(*values))  # type: ignore[return-value]

        return torch.func.grad(penalty, argnums=numbers)

    for order in (first, second):
        try:
            results = order(call)(*plain)
        except RuntimeError as error:
            assert re.search("functorch|differentiate twice|no autograd formula", str(error))
            continue
        for got, want in zip(results, order(call.reference)(*plain)):
            torch.testing.assert_close(got, want)


def test_forward_mode(call: Call) -> None:
    """Without a backward to record, forward-mode derivatives go through the definition."""
    routing, inputs = make(call)
    primals = tuple(value.detach() for value in inputs)
    tangents = tuple(torch.randn_like(value) for value in inputs)
    _, got = torch.func.jvp(lambda *values: call(routing, *values), primals, tangents)
    _, want = torch.func.jvp(lambda *values: call.reference(routing, *values), primals, tangents)
    torch.testing.assert_close(got, want)


def test_fake_tensors(call: Call) -> None:
    routing, inputs = make(call)
    want = call(routing, *inputs)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_routing, fakes = pytree.tree_map_only(Tensor, mode.from_tensor, (routing, inputs))
        out = call(fake_routing, *fakes)
        out.sum().backward()
    assert (out.shape, out.dtype, out.stride()) == (want.shape, want.dtype, want.stride())
    for fake, value in zip(fakes, inputs):
        assert (fake.grad.shape, fake.grad.dtype) == (value.shape, value.dtype)


def test_meta_tensors(call: Call) -> None:
    """The shape can be had without data."""
    routing, inputs = make(call)
    want = call(routing, *inputs)
    on_meta = [value.detach().to("meta") for value in inputs]
    out = call(routing.to("meta"), *on_meta)
    assert (out.shape, out.dtype, out.device.type) == (want.shape, want.dtype, "meta")


def test_plain_tensors_take_the_short_way(call: Call) -> None:
    routing, inputs = make(call)
    parameters = [nn.Parameter(value.detach()) for value in inputs]
    with Operators() as mode:
        for values in (inputs, parameters):
            call(routing, *values).sum().backward()
        with torch.no_grad():
            assert not call(routing, *inputs).requires_grad
    assert mode.seen == []


def test_subclasses_take_the_registered_way(call: Call) -> None:
    class Tagged(Tensor):
        pass

    routing, inputs = make(call)
    inputs[0] = inputs[0].detach().as_subclass(Tagged)
    with Operators() as mode:
        call(routing, *inputs)
    assert mode.seen == [f"tokenyard::{call.operator}"]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def called(call: Call) -> Tensor:
    routing, inputs = make(call)
    return call(routing, *inputs)


def ids() -> Tensor:
    return torch.randint(-1, 4, (8, 2))


EVERY_OP: dict[str, Callable[[], Any]] = {
    name: lambda call=call: called(call) for name, call in CALLS.items()
}
EVERY_OP |= {
    "activation": lambda: tokenyard.activation(random(8, 6), "clamped_swiglu", "interleaved"),
    "activation, ungated": lambda: tokenyard.activation(random(8, 6), "silu"),
    "topk": lambda: tokenyard.topk(random(8, 6), 2, score="softmax", normalize="sum")[0],
    "topk, elementwise": lambda: tokenyard.topk(random(8, 6), 2, score="identity")[0],
    "topk, groups": lambda: tokenyard.topk(
        random(8, 6), 2, num_groups=2, selection_bias=torch.rand(6)
    )[0],
    "topk, given": lambda: tokenyard.topk(random(8, 4), 2, topk_indices=ids())[0],
    "route": lambda: tokenyard.route(ids(), 3, row_alignment=4),
    "route, by weight": lambda: tokenyard.route(
        ids(), 3, capacity=2, drop="weight", topk_weights=torch.rand(8, 2)
    ),
    "route_mask": lambda: tokenyard.conventions.from_routing_map(torch.rand(8, 3) < 0.5, top_k=2),
}


def laid_out(value: Any, layout: str, differentiable: bool) -> Any:
    """The same values transposed or with other rows between, or floats of one row only."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    result = value.detach()
    if layout == "transposed" and value.dim() > 1:
        result = result.mT.contiguous().mT
    elif layout == "strided rows":
        result = result.repeat_interleave(2, dim=0)[::2]
    elif layout == "expanded" and value.is_floating_point():
        result = result[:1].expand(value.shape)
    return result.requires_grad_(differentiable and value.is_floating_point())


@pytest.mark.parametrize("name", EVERY_OP)
@pytest.mark.parametrize("layout", ["transposed", "strided rows", "expanded"])
def test_opcheck_of_any_strides(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op that a call and its backward reach: what the fakes promise is what comes."""
    monkeypatch.setattr(Operator, "__call__", lambda self, *args: self.registered(*args))
    with Operators() as mode:
        out = EVERY_OP[name]()
        if isinstance(out, Tensor):
            out.backward(torch.randn_like(out))
    assert mode.seen[-1].endswith("_backward") == isinstance(out, Tensor)
    for op, args in mode.calls:
        forward = not op.name().endswith("_backward")
        torch.library.opcheck(op, tuple(laid_out(value, layout, forward) for value in args))


def test_compiled_on_a_transposed_input() -> None:
    """Inductor reads outputs by the strides that were promised."""
    weight, a_TH = torch.randn(6, 5), torch.randn(9, 5)

    def experts(weight: Tensor, a_TH: Tensor) -> Tensor:
        return tokenyard.route(tokenyard.topk((weight @ a_TH.t()).t(), 2)[1], 6).row_of_slot

    def activated(weight: Tensor, a_TH: Tensor) -> Tensor:
        return tokenyard.activation((weight @ a_TH.t()).t(), "silu") * 2

    for function in (experts, activated):
        compiled = torch.compile(function, fullgraph=True)
        torch.testing.assert_close(compiled(weight, a_TH), function(weight, a_TH))


class Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.w_gate_up = nn.Parameter(torch.randn(4, 12, 8))
        self.w_down = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x_TH: Tensor, indices_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        routing = tokenyard.route(indices_TK, 4, row_alignment=4)
        if self.fused:
            return tokenyard.expert_mlp(x_TH, routing, topk_weights_TK, self.w_gate_up, self.w_down)
        rows_RH = tokenyard.permute(x_TH, routing)
        gate_up_RN = tokenyard.grouped_gemm(rows_RH, self.w_gate_up, routing, layout="ENK")
        y_RH = tokenyard.grouped_gemm(
            tokenyard.activation(gate_up_RN), self.w_down, routing, layout="ENK"
        )
        return tokenyard.unpermute(y_RH, routing, topk_weights_TK)


@pytest.mark.parametrize("fused", [False, True])
def test_export(fused: bool) -> None:
    def arguments(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        indices_TK = torch.randint(-1, 4, (num_tokens, 2))
        return torch.randn(num_tokens, 8), indices_TK, torch.rand(num_tokens, 2)

    layer = Layer(fused)
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    program = torch.export.export(layer, arguments(5), dynamic_shapes=[{0: tokens}] * 3)
    for num_tokens in (3, 5, 64):
        inputs = arguments(num_tokens)
        assert_same_bits(program.module()(*inputs), layer(*inputs))


def test_an_operator_without_gradient() -> None:
    def forward(x: Tensor) -> Tensor:
        return x + 1

    operator = Operator("test_no_gradient", forward, torch.empty_like)
    x = torch.zeros(2, requires_grad=True)
    assert operator.function is None and torch.equal(operator(x.detach()), torch.ones(2))
    torch.library.opcheck(operator.registered, (torch.zeros(2),))
