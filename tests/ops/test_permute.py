"""permute and permute_slots against plain loops; gradients, hazards, compilation, errors."""

import pytest
import torch
from cases import (
    CALLS,
    FLOATS,
    MOVED,
    SHAPES,
    SPECIAL,
    Case,
    accumulator,
    assert_same_bits,
    random_case,
    rounded,
    routings,
    wide,
)
from hypothesis import given, settings
from torch import Tensor

import tokenyard
from tokenyard import ArgumentError

PERMUTE = [tokenyard.permute, tokenyard.permute_reference]
PERMUTE_SLOTS = [tokenyard.permute_slots, tokenyard.permute_slots_reference]


def literal_rows(x_TH: Tensor, case: Case) -> Tensor:
    rows_RH = torch.zeros(len(case.slot_of_row()), x_TH.shape[1]).to(x_TH.dtype)
    for row, slot in enumerate(case.slot_of_row()):
        if slot >= 0:
            rows_RH[row] = x_TH[slot // case.top_k]
    return rows_RH


def literal_slots(values_TK: Tensor, case: Case) -> Tensor:
    rows_R = torch.zeros(len(case.slot_of_row())).to(values_TK.dtype)
    for row, slot in enumerate(case.slot_of_row()):
        if slot >= 0:
            rows_R[row] = values_TK[slot // case.top_k, slot % case.top_k]
    return rows_R


def literal_d_x(d_rows_RH: Tensor, case: Case) -> Tensor:
    """A chain from zero in the accumulator's type, k ascending, rounded once: scalar by scalar."""
    dtype, acc = d_rows_RH.dtype, accumulator(d_rows_RH.dtype)
    d_x_TH = torch.zeros(case.num_tokens, d_rows_RH.shape[1], dtype=torch.float64)
    for token, slots in enumerate(case.rows_of_token()):
        for h in range(d_rows_RH.shape[1]):
            total = acc(0)
            for _, row, _ in slots:
                total = total + acc(d_rows_RH[row, h].item())
            d_x_TH[token, h] = rounded(total, dtype)
    return d_x_TH.to(dtype)


@settings(max_examples=60)
@given(routings())
def test_forward_and_gradient_equal_the_loops(case: Case) -> None:
    for dtype in FLOATS:
        x_TH = wide(case.num_tokens, 3, dtype=dtype).requires_grad_()
        rows_RH = tokenyard.permute(x_TH, case.route())
        assert_same_bits(rows_RH, literal_rows(x_TH.detach(), case))
        assert_same_bits(tokenyard.permute_reference(x_TH, case.route()), rows_RH)
        d_rows_RH = wide(*rows_RH.shape, dtype=dtype)
        (d_x_TH,) = torch.autograd.grad(rows_RH, x_TH, d_rows_RH)
        assert_same_bits(d_x_TH, literal_d_x(d_rows_RH, case))


@settings(max_examples=60)
@given(routings())
def test_slots_equal_the_loops(case: Case) -> None:
    values_TK = wide(case.num_tokens, case.top_k, dtype=torch.float32).requires_grad_()
    rows_R = tokenyard.permute_slots(values_TK, case.route())
    assert_same_bits(rows_R, literal_slots(values_TK.detach(), case))
    assert_same_bits(tokenyard.permute_slots_reference(values_TK, case.route()), rows_R)
    d_rows_R = wide(*rows_R.shape, dtype=torch.float32)
    (d_values_TK,) = torch.autograd.grad(rows_R, values_TK, d_rows_R)
    want_TK = torch.zeros(case.num_tokens, case.top_k)
    for token, slots in enumerate(case.rows_of_token()):
        for k, row, _ in slots:
            want_TK[token, k] = d_rows_R[row]
    assert_same_bits(d_values_TK, want_TK)


@pytest.mark.parametrize("num_tokens, size, num_experts, top_k", [*SHAPES, (0, 8, 6, 2)])
@pytest.mark.parametrize("row_alignment", [1, 16])
def test_shapes_of_real_models(
    num_tokens: int, size: int, num_experts: int, top_k: int, row_alignment: int
) -> None:
    case = random_case(num_tokens, num_experts, top_k, row_alignment)
    x_TH = wide(num_tokens, size, dtype=torch.bfloat16).requires_grad_()
    rows_RH = tokenyard.permute(x_TH, case.route())
    assert_same_bits(rows_RH, literal_rows(x_TH.detach(), case))
    d_rows_RH = wide(*rows_RH.shape, dtype=torch.bfloat16)
    (d_x_TH,) = torch.autograd.grad(rows_RH, x_TH, d_rows_RH)
    assert_same_bits(d_x_TH, literal_d_x(d_rows_RH, case))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("name", ["aligned", "nothing routed", "no tokens, rows", "rows too few"])
def test_every_dtype_travels_unchanged(dtype: torch.dtype, name: str) -> None:
    case = SPECIAL[name]
    for permute in PERMUTE:
        x_TH = (torch.randn(case.num_tokens, 5) * 50).to(dtype)
        assert_same_bits(permute(x_TH, case.route()), literal_rows(x_TH, case))
    for permute_slots in PERMUTE_SLOTS:
        values_TK = (torch.randn(case.num_tokens, case.top_k) * 50).to(dtype)
        assert_same_bits(permute_slots(values_TK, case.route()), literal_slots(values_TK, case))


def test_nan_payloads_and_signed_zeros_travel_unchanged() -> None:
    bits_TH = torch.tensor([[0x7FC01234, -0x80000000], [0x7F800001, 1], [-1, 0]], dtype=torch.int32)
    case = SPECIAL["aligned"]
    x_TH = torch.cat([bits_TH, bits_TH[:1]]).view(torch.float32)
    rows_RH = tokenyard.permute(x_TH, case.route())
    assert torch.equal(
        rows_RH.view(torch.int32), literal_rows(x_TH.view(torch.int32), case).view(torch.int32)
    )


@pytest.mark.parametrize("name", SPECIAL)
def test_gradcheck(name: str) -> None:
    case = SPECIAL[name]
    routing = case.route()
    x_TH = torch.randn(case.num_tokens, 3, dtype=torch.float64, requires_grad=True)
    values_TK = torch.randn(case.num_tokens, case.top_k, dtype=torch.float64, requires_grad=True)
    for permute in PERMUTE:
        assert torch.autograd.gradcheck(lambda x: permute(x, routing), x_TH)  # noqa: B023
    for permute_slots in PERMUTE_SLOTS:
        assert torch.autograd.gradcheck(
            lambda v: permute_slots(v, routing),  # noqa: B023
            values_TK,
        )


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.usefixtures("poisoned_memory")
def test_padding_is_zero_and_its_gradient_is_ignored(name: str) -> None:
    case = SPECIAL[name]
    for dtype in (torch.float32, torch.bfloat16):
        x_TH = torch.randn(case.num_tokens, 4).to(dtype).requires_grad_()
        values_TK = torch.randn(case.num_tokens, case.top_k).to(dtype).requires_grad_()
        rows_RH = tokenyard.permute(x_TH, case.route())
        rows_R = tokenyard.permute_slots(values_TK, case.route())
        assert (rows_RH[case.padding()] == 0).all() and (rows_R[case.padding()] == 0).all()
        for bad in (float("nan"), float("inf")):
            d_rows_RH, d_rows_R = torch.randn_like(rows_RH), torch.randn_like(rows_R)
            d_rows_RH[case.padding()], d_rows_R[case.padding()] = bad, bad
            (d_x_TH,) = torch.autograd.grad(rows_RH, x_TH, d_rows_RH, retain_graph=True)
            assert_same_bits(d_x_TH, literal_d_x(d_rows_RH, case))
            (d_values_TK,) = torch.autograd.grad(rows_R, values_TK, d_rows_R, retain_graph=True)
            assert d_values_TK.isfinite().all()
            for token, slots in enumerate(case.rows_of_token()):
                absent = set(range(case.top_k)) - {k for k, _, _ in slots}
                assert all(d_values_TK[token, k] == 0 for k in absent)


def test_unrouted_tokens_do_not_leak() -> None:
    case = Case(((0, 1), (-1, -1), (2, 3)), 2, 3, row_alignment=4)
    x_TH = torch.ones(3, 2)
    x_TH[1] = float("nan")
    assert tokenyard.permute(x_TH, case.route()).isfinite().all()
    values_TK = torch.tensor([[1.0, 1.0], [float("nan"), float("inf")], [1.0, float("nan")]])
    assert tokenyard.permute_slots(values_TK, case.route()).isfinite().all()


def test_gradient_is_accumulated_in_fp32() -> None:
    """In bf16 256 + 1 is 256 again; in fp16 2048 + 1 is 2048."""
    case = Case(((0, 1, 2),), 3, 3)
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        x_TH = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
        rows_RH = tokenyard.permute(x_TH, case.route())
        d_rows_RH = torch.tensor([[large], [1.0], [1.0]], dtype=dtype)
        rows_RH.backward(d_rows_RH)
        assert x_TH.grad is not None and x_TH.grad.item() == large + 2


def test_strides() -> None:
    case = SPECIAL["aligned"]
    wide_TH = torch.randn(case.num_tokens, 12)
    transposed_TH = torch.randn(4, case.num_tokens).t()
    expanded_TH = torch.randn(1, 4).expand(case.num_tokens, 4)
    offset_TH = torch.randn(case.num_tokens * 4 + 1)[1:].view(case.num_tokens, 4)
    fp8_TH = torch.randn(4, case.num_tokens).to(torch.float8_e4m3fn).t()
    for x_TH in (wide_TH[:, 4:8], wide_TH[:, ::3], transposed_TH, expanded_TH, offset_TH, fp8_TH):
        assert_same_bits(tokenyard.permute(x_TH, case.route()), literal_rows(x_TH, case))
    values_TK = torch.randn(case.top_k, case.num_tokens).t()
    rows_R = tokenyard.permute_slots(values_TK, case.route())
    assert_same_bits(rows_R, literal_slots(values_TK, case))


@pytest.mark.parametrize("name", ["permute", "permute_slots"])
@pytest.mark.parametrize("case", ["aligned", "nothing routed"])
def test_opcheck(name: str, case: str) -> None:
    routing = SPECIAL[case].route()
    size = 3 if name == "permute" else routing.top_k
    x = torch.randn(routing.num_tokens, size, requires_grad=True)
    operator = getattr(torch.ops.tokenyard, name).default
    torch.library.opcheck(operator, (x, routing.row_of_slot, routing.slot_of_row))
    rows = torch.randn(routing.num_rows, 3) if name == "permute" else torch.randn(routing.num_rows)
    operator = getattr(torch.ops.tokenyard, f"{name}_backward").default
    torch.library.opcheck(operator, (rows, routing.row_of_slot))


@pytest.mark.parametrize("name", ["permute", "permute_slots"])
def test_compile_once_for_every_number_of_tokens(name: str) -> None:
    call = CALLS[name]

    def function(indices_TK: Tensor, x: Tensor) -> Tensor:
        return call(tokenyard.route(indices_TK, 3, row_alignment=4), x)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 9, 16):
        indices_TK = torch.randint(-1, 4, (num_tokens, 2))
        stance = "default" if num_tokens == 5 else "fail_on_recompile"
        x = torch.randn(num_tokens, 4 if name == "permute" else 2, requires_grad=True)
        with torch.compiler.set_stance(stance):
            out = compiled(indices_TK, x)
            grad = torch.randn_like(out)
            (d_x,) = torch.autograd.grad(out, x, grad)
        want = function(indices_TK, x)
        assert_same_bits(out, want)
        assert_same_bits(d_x, torch.autograd.grad(want, x, grad)[0])


def test_errors_name_operator_and_argument() -> None:
    routing = SPECIAL["aligned"].route()
    x_TH, values_TK = torch.randn(4, 3), torch.randn(4, 2)
    permute, slots = tokenyard.permute, tokenyard.permute_slots
    for function, args, argument in [
        (permute, (x_TH[:3], routing), "x"),
        (permute, (x_TH[0], routing), "x"),
        (permute, (x_TH[..., None], routing), "x"),
        (permute, ([[1.0]], routing), "x"),
        (permute, (x_TH, x_TH), "routing"),
        (permute, (x_TH.to("meta"), routing), "routing"),
        (slots, (values_TK[:, :1], routing), "values"),
        (slots, (values_TK.flatten(), routing), "values"),
        (slots, (None, routing), "values"),
        (slots, (values_TK, None), "routing"),
        (slots, (values_TK.to("meta"), routing), "routing"),
    ]:
        with pytest.raises(ArgumentError, match=rf"tokenyard\.{function.__name__}: `{argument}`"):
            function(*args)


def test_complex_numbers_are_refused() -> None:
    """Their gradients would be summed as real numbers."""
    routing = tokenyard.route(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ArgumentError, match="permute: `x`: expected a real dtype"):
        tokenyard.permute(torch.ones(2, 3) * 1j, routing)
    with pytest.raises(ArgumentError, match="permute_slots: `values`: expected a real dtype"):
        tokenyard.permute_slots(torch.ones(2, 1) * 1j, routing)
