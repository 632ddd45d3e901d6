"""grouped_gemm against plain loops; gradients, hazards, autocast, compilation, errors."""

import random
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    CALLS,
    FLOATS,
    SPECIAL,
    Case,
    assert_same_bits,
    integers,
    nearest_fp32,
    random_case,
    rounded,
    routings,
)
from hypothesis import given, settings
from torch import Tensor

import tokenyard
from tokenyard import ArgumentError

GROUPED_GEMM = [tokenyard.grouped_gemm, tokenyard.grouped_gemm_reference]
BF16 = torch.bfloat16


def stored(weight_ENK: Tensor, layout: str) -> Tensor:
    return weight_ENK if layout == "ENK" else weight_ENK.transpose(1, 2).contiguous()


def once(exact: Any, dtype: torch.dtype) -> Tensor:
    """Nested lists of exact integers, rounded once to dtype."""
    flat = torch.tensor(exact, dtype=torch.float64)
    if dtype == torch.float64:
        return flat
    values = [rounded(nearest_fp32(Fraction(v)), dtype) for v in flat.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(flat.shape).to(dtype)


def literal(
    rows_RK: Tensor,
    weight_ENK: Tensor,
    bias_EN: Tensor | None,
    experts: list[int],
    d_out_RN: Tensor,
) -> dict[str, Any]:
    """The output and the gradients as nested lists, term by term."""
    num_experts, size_out, size_in = weight_ENK.shape
    rows, weight, d_out = rows_RK.tolist(), weight_ENK.tolist(), d_out_RN.tolist()
    out = [[0.0] * size_out for _ in rows]
    d_rows = [[0.0] * size_in for _ in rows]
    d_weight = [[[0.0] * size_in for _ in range(size_out)] for _ in range(num_experts)]
    d_bias = [[0.0] * size_out for _ in range(num_experts)]
    for r, expert in enumerate(experts):
        if expert < 0:
            continue
        for n in range(size_out):
            out[r][n] = 0.0 if bias_EN is None else bias_EN[expert, n].item()
            d_bias[expert][n] += d_out[r][n]
            for k in range(size_in):
                out[r][n] += weight[expert][n][k] * rows[r][k]
                d_rows[r][k] += weight[expert][n][k] * d_out[r][n]
                d_weight[expert][n][k] += d_out[r][n] * rows[r][k]
    return {"out": out, "rows": d_rows, "weight": d_weight, "bias": d_bias}


def check_against_loops(
    case: Case, dtype: torch.dtype, layout: str, sizes: tuple[int, int], biased: bool
) -> None:
    """Small integers: every sum is exact, so one rounding is the whole difference."""
    size_in, size_out = sizes
    experts = case.expert_of_row()
    rows_RK = integers(len(experts), size_in, dtype=dtype)
    weight_ENK = integers(case.num_experts, size_out, size_in, dtype=dtype)
    bias_EN = integers(case.num_experts, size_out, dtype=dtype, bound=200) if biased else None
    d_out_RN = integers(len(experts), size_out, dtype=dtype)
    for buffer in (rows_RK, d_out_RN):
        buffer[case.padding()] = random.choice([float("nan"), float("inf")])
    want = literal(rows_RK, weight_ENK, bias_EN, experts, d_out_RN)
    inputs = [rows_RK, stored(weight_ENK, layout), *([] if bias_EN is None else [bias_EN])]
    inputs = [value.requires_grad_() for value in inputs]
    bias = inputs[2] if biased else None
    for grouped_gemm in GROUPED_GEMM:
        out_RN = grouped_gemm(inputs[0], inputs[1], case.route(), layout=layout, bias=bias)
        assert_same_bits(out_RN.abs(), once(want["out"], dtype).view_as(out_RN).abs())
        assert torch.equal(out_RN, once(want["out"], dtype).view_as(out_RN))
    out_RN = tokenyard.grouped_gemm(*inputs[:2], case.route(), layout=layout, bias=bias)
    grads = torch.autograd.grad(out_RN, inputs, d_out_RN)
    wanted = [
        once(want["rows"], dtype).view_as(rows_RK),
        stored(once(want["weight"], dtype), layout),
        once(want["bias"], dtype),
    ]
    for got, expected in zip(grads, wanted):
        assert got.dtype == dtype and torch.equal(got, expected)


@settings(max_examples=40)
@given(routings())
def test_equals_the_loops(case: Case) -> None:
    layout, biased = random.choice(["ENK", "EKN"]), random.random() < 0.5
    check_against_loops(case, random.choice(FLOATS), layout, (3, 5), biased)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("biased", [False, True])
def test_sizes_of_odd_and_even_experts(dtype: torch.dtype, layout: str, biased: bool) -> None:
    for sizes, num_experts in (((1, 1), 3), ((8, 33), 6), ((20, 8), 60), ((33, 4), 1)):
        case = random_case(
            16, num_experts, min(2, num_experts), row_alignment=random.choice([1, 4])
        )
        check_against_loops(case, dtype, layout, sizes, biased)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [3, 64])
@pytest.mark.usefixtures("poisoned_memory")
def test_accumulates_in_fp32_and_rounds_once(dtype: torch.dtype, size: int) -> None:
    """The bias joins before the rounding: a large product, 1 and minus the large number leave 1."""
    large = 256.0 if dtype == BF16 else 2048.0
    rows_RK = torch.zeros(size, size, dtype=dtype)
    rows_RK[:, 0], rows_RK[:, 1] = large, 1
    weight_EKN = torch.ones(1, size, size, dtype=dtype)
    bias_EN = torch.full((1, size), -large, dtype=dtype)
    offsets = torch.tensor([0, size])
    out_RN = tokenyard.grouped_gemm(rows_RK, weight_EKN, offsets, layout="EKN", bias=bias_EN)
    assert torch.equal(out_RN, torch.ones_like(out_RN))
    # more equal terms than a 16-bit sum can count
    count = 4096
    rows_RK = torch.ones(count, size, dtype=dtype)
    weight_EKN.requires_grad_()
    bias_EN.requires_grad_()
    offsets = torch.tensor([0, count])
    out_RN = tokenyard.grouped_gemm(rows_RK, weight_EKN, offsets, layout="EKN", bias=bias_EN)
    out_RN.sum().backward()
    for gradient in (weight_EKN.grad, bias_EN.grad):
        assert gradient is not None and torch.equal(gradient, torch.full_like(gradient, count))


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.usefixtures("poisoned_memory")
def test_gradcheck(name: str, layout: str) -> None:
    case = SPECIAL[name]
    routing = case.route()
    shapes = [(routing.num_rows, 2), (case.num_experts, 2, 2), (case.num_experts, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def function(rows_RK: Tensor, weight: Tensor, bias_EN: Tensor) -> Tensor:
        return tokenyard.grouped_gemm(rows_RK, weight, routing, layout=layout, bias=bias_EN)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradcheck(lambda *pair: function(*pair, None), inputs[:2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_instead_of_a_routing(dtype: torch.dtype) -> None:
    """Rows past the last offset come out zero, are never read, and have gradient zero."""
    rows_RK = integers(7, 4, dtype=torch.float32)
    rows_RK[5:] = float("nan")
    rows_RK.requires_grad_()
    weight_ENK = integers(4, 3, 4, dtype=torch.float32)
    offsets = torch.tensor([0, 2, 2, 4, 5], dtype=dtype)
    out_RN = tokenyard.grouped_gemm(rows_RK, weight_ENK, offsets, layout="ENK")
    experts = [0, 0, 2, 2, 3, -1, -1]
    want = literal(rows_RK.detach(), weight_ENK, None, experts, torch.ones(7, 3))
    assert out_RN.tolist() == want["out"]
    out_RN.sum().backward()
    assert rows_RK.grad is not None and rows_RK.grad.tolist() == want["rows"]


def test_strides() -> None:
    case, float32 = SPECIAL["aligned"], torch.float32
    num_rows = len(case.slot_of_row())
    for rows_RK in (
        integers(num_rows, 12, dtype=float32)[:, 4:8],
        integers(4, num_rows, dtype=float32).t(),
        integers(num_rows, 8, dtype=float32)[:, ::2],
        integers(1, 4, dtype=float32).expand(num_rows, 4),
    ):
        for weight_ENK in (
            integers(4, 4, 6, dtype=float32).transpose(1, 2),
            integers(4, 6, 9, dtype=float32)[:, :, ::2][:, :, :4],
            integers(1, 6, 4, dtype=float32).expand(4, 6, 4),
        ):
            d_out_RN = integers(6, num_rows, dtype=float32).t()
            inputs = [rows_RK.detach().requires_grad_(), weight_ENK.detach().requires_grad_()]
            want = literal(rows_RK, weight_ENK, None, case.expert_of_row(), d_out_RN)
            out_RN = tokenyard.grouped_gemm(*inputs, case.route(), layout="ENK")
            assert out_RN.tolist() == want["out"]
            d_rows_RK, d_weight_ENK = torch.autograd.grad(out_RN, inputs, d_out_RN)
            assert d_rows_RK.tolist() == want["rows"]
            assert d_weight_ENK.tolist() == want["weight"]


def test_autocast() -> None:
    routing = random_case(8, 3, 2).route()
    call = CALLS["grouped_gemm, bias"]
    inputs = call.inputs(routing, torch.float32)
    halves = [value.detach().to(BF16).requires_grad_() for value in inputs]
    want_RN = call(routing, *halves)
    grad_RN = torch.randn_like(want_RN)
    wanted = torch.autograd.grad(want_RN, halves, grad_RN)
    with torch.autocast("cpu", BF16):
        out_RN = call(routing, *inputs)
        inside = torch.autograd.grad(out_RN, inputs, grad_RN, retain_graph=True)
    outside = torch.autograd.grad(out_RN, inputs, grad_RN)
    assert_same_bits(out_RN, want_RN)
    for grads in (inside, outside):
        for got, want in zip(grads, wanted):
            assert_same_bits(got, want.float())


@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(layout: str, transposed: bool) -> None:
    routing = SPECIAL["aligned"].route()
    shape = (4, 6, 3) if layout == "ENK" else (4, 3, 6)
    weight = torch.randn(shape)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = [torch.randn(20, 3).requires_grad_(), weight.requires_grad_()]
    maps = routing.expert_offsets, routing.tokens_per_expert
    for bias_EN in (None, torch.randn(4, 6, requires_grad=True)):
        operator = torch.ops.tokenyard.grouped_gemm.default
        torch.library.opcheck(operator, (*inputs, bias_EN, *maps, layout))
    operator = torch.ops.tokenyard.grouped_gemm_backward.default
    saved = [value.detach() for value in inputs]
    arguments = (torch.randn(20, 6), *saved, *maps, layout, True, not transposed, True)
    torch.library.opcheck(operator, arguments)


def test_compile_once_for_every_number_of_tokens() -> None:
    call = CALLS["grouped_gemm, bias"]
    torch._dynamo.reset()  # compilations of a code object are counted
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 9, 16):
        routing = random_case(num_tokens, 3, 2).route()
        inputs = call.inputs(routing, torch.float32)
        stance = "default" if num_tokens == 5 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            out_RN = compiled(routing, *inputs)
            grad_RN = torch.randn_like(out_RN)
            grads = torch.autograd.grad(out_RN, inputs, grad_RN)
        want_RN = call(routing, *inputs)
        assert_same_bits(out_RN, want_RN)
        for got, want in zip(grads, torch.autograd.grad(want_RN, inputs, grad_RN)):
            assert_same_bits(got, want)


@pytest.mark.parametrize(
    "argument, changes",
    [
        ("rows", {"rows": torch.zeros(19, 3)}),
        ("rows", {"rows": torch.zeros(20)}),
        ("rows", {"rows": torch.zeros(20, 3, dtype=torch.int64)}),
        ("rows", {"rows": None}),
        ("layout", {"layout": "NK"}),
        ("routing", {"rows": torch.zeros(20, 3, device="meta")}),
        ("groups", {"groups": torch.tensor([0.0, 1, 2, 3, 4])}),
        ("groups", {"groups": torch.tensor([[0, 1]])}),
        ("groups", {"groups": [0, 1, 2, 3, 4]}),
        (r"groups\.shape\[0\]", {"groups": torch.tensor([0])}),
        ("groups", {"groups": torch.tensor([1, 1, 2, 3, 4])}),
        ("groups", {"groups": torch.tensor([0, 2, 1, 3, 4])}),
        ("groups", {"groups": torch.tensor([0, 2, 4, 4, 21])}),
        ("weight", {"weight": torch.zeros(4, 3, 6)}),
        ("weight", {"weight": torch.zeros(3, 6, 3)}),
        ("weight", {"weight": torch.zeros(4, 6, 3, dtype=BF16)}),
        ("weight", {"weight": torch.zeros(4, 6, 3, device="meta")}),
        ("bias", {"bias": torch.zeros(6)}),
        ("bias", {"bias": torch.zeros(4, 5)}),
        ("bias", {"bias": torch.zeros(4, 6, dtype=torch.float64)}),
    ],
)
def test_errors_name_operator_and_argument(argument: str, changes: dict[str, Any]) -> None:
    arguments = {"rows": torch.zeros(20, 3), "weight": torch.zeros(4, 6, 3), "layout": "ENK"}
    arguments |= {"groups": SPECIAL["aligned"].route()} | changes
    with pytest.raises(ArgumentError, match=rf"tokenyard\.grouped_gemm: `{argument}`"):
        tokenyard.grouped_gemm(**arguments)


@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_weight_gradient_added_to_a_buffer(layout: str, dtype: torch.dtype) -> None:
    """As Megatron's main_grad: what is there stays, an empty expert's part untouched."""
    counts = [3, 0, 5]
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    rows_RK, d_out_RN = torch.randn(10, 4).to(dtype), torch.randn(10, 6).to(dtype)
    rows_RK[8:] = torch.nan  # no expert's
    out = torch.randn((3, 6, 4) if layout == "ENK" else (3, 4, 6))
    start, gained, first = out.clone(), torch.zeros(out.shape, dtype=torch.float64), 0
    for expert, count in enumerate(counts):
        for row in range(first, first + count):
            product = torch.outer(d_out_RN[row].double(), rows_RK[row].double())
            gained[expert] += product if layout == "ENK" else product.t()
        first += count
    add = partial(tokenyard.grouped_gemm_add_weight_gradient, layout=layout)
    compiled = torch.compile(add, fullgraph=True)
    for times, function in ((1, add), (2, compiled)):
        result = function(d_out_RN, rows_RK, offsets, out)
        assert result.data_ptr() == out.data_ptr()
        torch.testing.assert_close(
            out.double(), start.double() + times * gained, rtol=1e-5, atol=1e-5
        )
        assert torch.equal(out[1], start[1])
    with pytest.raises(ArgumentError, match="`out`: expected shape"):
        add(d_out_RN, rows_RK, offsets, out[:, :2])
    with pytest.raises(ArgumentError, match="add_weight_gradient: `groups"):
        add(d_out_RN, rows_RK, offsets[:1], out)
