"""The kernels of permute and permute_slots in the interpreter, bit for bit against the definition."""

import os

import pytest
import torch
from cases import FLOATS, MOVED, SHAPES, SPECIAL, Case, assert_same_bits, random_case, routings
from hypothesis import given, settings
from launches import launched
from torch import Tensor

import tokenyard
from tokenyard import Routing

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


def rows_of(x_TH: Tensor, routing: Routing) -> Tensor:
    got, names = launched(lambda: tokenyard.permute(x_TH, routing))
    assert names == ["_permute_kernel"] * (got.numel() > 0)
    assert_same_bits(got, tokenyard.permute_reference(x_TH, routing))
    return got


def values_of(values_TK: Tensor, routing: Routing) -> Tensor:
    got, names = launched(lambda: tokenyard.permute_slots(values_TK, routing))
    assert names == ["_gather_kernel"] * (got.numel() > 0 and values_TK.numel() > 0)
    assert_same_bits(got, tokenyard.permute_slots_reference(values_TK, routing))
    return got


def check(routing: Routing, width: int = 8, dtype: torch.dtype = torch.float16) -> None:
    rows_of(torch.randn(routing.num_tokens, width).to(dtype), routing)
    values_of(torch.randn(routing.num_tokens, routing.top_k).to(dtype), routing)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_routings(name: str, poisoned_memory: None) -> None:
    check(SPECIAL[name].route())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("row_alignment", [1, 16])
def test_shapes_of_models(
    shape: tuple[int, ...], row_alignment: int, poisoned_memory: None
) -> None:
    num_tokens, width, num_experts, top_k = shape
    check(random_case(num_tokens, num_experts, top_k, row_alignment).route(), width)


@settings(max_examples=25)
@given(routings())
def test_drawn_routings(case: Case) -> None:
    check(case.route())


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_dtypes_travel_bit_for_bit(dtype: torch.dtype) -> None:
    routing = random_case(9, 4, 2, row_alignment=4).route()
    bits = torch.randint(0, 256, (9, 20 * dtype.itemsize), dtype=torch.uint8)
    x_TH = bits % 2 == 1 if dtype == torch.bool else bits.view(dtype)  # NaN of every payload
    got, names = launched(lambda: tokenyard.permute(x_TH, routing))
    assert names == ["_permute_kernel"]
    want = tokenyard.permute_reference(x_TH.view(torch.uint8), routing)
    assert torch.equal(got.view(torch.uint8), want)

    values_TK = x_TH[:, 3:5]
    got, names = launched(lambda: tokenyard.permute_slots(values_TK, routing))
    assert names == ["_gather_kernel"]
    want = tokenyard.permute_slots_reference(values_TK.to(dtype), routing)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("width", [1, 2, 3, 20, 511, 512, 513, 1023, 1024, 1025, 2880, 4100, 16500])
def test_widths(width: int, poisoned_memory: None) -> None:
    routing = random_case(3, 4, 2, row_alignment=2).route()
    for dtype in (torch.float16, torch.float32, torch.uint8):
        rows_of(torch.randn(3, width).to(dtype), routing)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 127, 128, 129, 257])
def test_tokens_at_a_block_boundary(num_tokens: int, poisoned_memory: None) -> None:
    """16 tokens a program at width 64, 128 at width 8."""
    routing = random_case(num_tokens, 5, 2, row_alignment=4).route()
    for width in (8, 64):
        rows_of(torch.randn(num_tokens, width).half(), routing)


@pytest.mark.parametrize("num_rows", [511, 1023, 1024, 1025])
def test_values_at_a_block_boundary(num_rows: int, poisoned_memory: None) -> None:
    ids_TK = torch.randint(-1, 6, (num_rows, 1))
    routing = tokenyard.route(ids_TK, 5, num_rows=num_rows)
    values_of(torch.randn(num_rows, 1), routing)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 15), (2, 16), (3, 17), (2, 300), (0, 40)])
def test_padding_is_zero(num_tokens: int, num_rows: int, poisoned_memory: None) -> None:
    """Few tokens and many rows: each program zeroes its share of the padding."""
    routing = tokenyard.route(torch.zeros(num_tokens, 2, dtype=torch.int64), 3, num_rows=num_rows)
    for width in (8, 1500):
        rows_RH = rows_of(torch.randn(num_tokens, width), routing)
        assert not rows_RH[routing.slot_of_row < 0].any()


@pytest.mark.parametrize(("num_experts", "top_k"), [(40, 22), (33, 33), (48, 40), (70, 65)])
def test_many_choices(num_experts: int, top_k: int, poisoned_memory: None) -> None:
    """Past 32 choices the loop ends at the last one that has a row."""
    check(random_case(5, num_experts, top_k, row_alignment=2).route(), 20)
    ids_TK = torch.full((5, top_k), -1)
    ids_TK[3, top_k - 1], ids_TK[4, 0] = 1, 1
    check(tokenyard.route(ids_TK, num_experts), 20)
    check(tokenyard.route(torch.full((5, top_k), -1), num_experts), 20)


def test_strides(poisoned_memory: None) -> None:
    routing = random_case(12, 4, 2, row_alignment=2).route()
    gate_up = torch.randn(12, 80).half()
    column = torch.randn(24, 1)
    for x_TH in (
        gate_up[:, 40:],  # a row-strided view
        gate_up[:, 3:43],  # unaligned as well
        gate_up[:, ::2],
        torch.randn(20, 12).T,
        torch.randn(1, 20).expand(12, 20),
        torch.randn(12, 1).expand(12, 20),
        column[::2],
        torch.randn(12, 5)[:, 2:3],
        torch.randn(12 * 20 + 1)[1:].view(12, 20),
    ):
        rows_of(x_TH, routing)
    for values_TK in (
        torch.randn(2, 12).T,
        torch.randn(12, 7)[:, 3:5],
        torch.ones(1).expand(12, 2),
    ):
        values_of(values_TK, routing)


def test_maps_that_start_at_odd_addresses() -> None:
    """Maps cut from a larger buffer."""
    routing = random_case(9, 4, 3).route()
    x_TH = torch.randn(9, 8).half()
    maps = {}
    for name in ("row_of_slot", "slot_of_row"):
        value = getattr(routing, name)
        maps[name] = torch.cat([value.new_full((1,), 99), value.flatten()])[1:].view(value.shape)
    shifted = Routing(
        topk_indices=routing.topk_indices,
        expert_offsets=routing.expert_offsets,
        tokens_per_expert=routing.tokens_per_expert,
        num_dropped=routing.num_dropped,
        num_experts=4,
        **maps,
    )
    rows_of(x_TH, shifted)
    values_of(torch.randn(9, 3), shifted)


def test_no_columns() -> None:
    assert rows_of(torch.randn(3, 0), random_case(3, 4, 2).route()).shape == (6, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_gradients(dtype: torch.dtype, name: str, poisoned_memory: None) -> None:
    """Of tokens, a sum of rows; of values, a move. Gradients of padding rows are never read."""
    case = SPECIAL[name]
    routing = case.route()
    grad_RH = torch.randn(routing.num_rows, 20).to(dtype)
    grad_RH[case.padding()] = torch.nan

    def gradients() -> tuple[Tensor, Tensor]:
        x_TH = torch.zeros(routing.num_tokens, 20, dtype=dtype, requires_grad=True)
        values_TK = torch.zeros(routing.num_tokens, routing.top_k, dtype=dtype, requires_grad=True)
        rows_RH = tokenyard.permute(x_TH, routing)
        values_R = tokenyard.permute_slots(values_TK, routing)
        return (
            *torch.autograd.grad(rows_RH, x_TH, grad_RH),
            *torch.autograd.grad(values_R, values_TK, grad_RH[:, 0]),
        )

    (d_x_TH, d_values_TK), names = launched(gradients)
    if routing.num_rows and routing.num_tokens:
        assert {"_combine_kernel", "_gather_kernel"} <= set(names)
    want = gradients()
    assert_same_bits(d_x_TH, want[0])
    assert_same_bits(d_values_TK, want[1])


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d != torch.bfloat16], ids=str)
def test_expanded_gradients(dtype: torch.dtype) -> None:
    routing = random_case(9, 4, 3, row_alignment=4).route()

    def gradients() -> tuple[Tensor, Tensor]:
        x_TH = torch.zeros(9, 20, dtype=dtype, requires_grad=True)
        values_TK = torch.zeros(9, 3, dtype=dtype, requires_grad=True)
        tokenyard.permute(x_TH, routing).sum().backward()
        tokenyard.permute_slots(values_TK, routing).sum().backward()
        assert x_TH.grad is not None and values_TK.grad is not None
        return x_TH.grad, values_TK.grad

    (d_x_TH, d_values_TK), _ = launched(gradients)
    routed_TK = routing.row_of_slot >= 0
    assert_same_bits(d_x_TH, routed_TK.sum(1, keepdim=True).to(dtype).expand(9, 20))
    assert_same_bits(d_values_TK, routed_TK.to(dtype))
