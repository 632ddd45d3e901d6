"""`tokenyard.router_logits`: loops, gradients of every dtype, what is saved, the 16-bit GEMMs."""

import importlib
import re
from typing import Any

import pytest
import torch
from cases import FLOATS, assert_same_bits, integers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tokenyard import ArgumentError, router_logits, router_logits_reference, use
from tokenyard import nn as layers

module: Any = importlib.import_module("tokenyard.ops.router_logits")
SHAPES = [(5, 8, 3), (1, 1, 1), (7, 33, 160), (0, 4, 3), (4, 0, 3)]
DTYPES = [(x, w, b) for x in FLOATS for w in FLOATS for b in (None, w, torch.float32)]


def inputs_of(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
) -> list[Tensor]:
    num_tokens, hidden, num_experts = shape
    shapes = [(num_tokens, hidden), (num_experts, hidden), (num_experts,)]
    return [torch.randn(s).to(dtype).requires_grad_() for s, dtype in zip(shapes, dtypes) if dtype]


def everything(function: Any, inputs: list[Tensor], grad_TE: Tensor | None = None) -> list[Tensor]:
    """Logits and every gradient."""
    logits_TE = function(*inputs)
    torch.manual_seed(1)
    grad_TE = torch.randn_like(logits_TE) if grad_TE is None else grad_TE
    return [logits_TE.detach(), *torch.autograd.grad(logits_TE, inputs, grad_TE)]


@pytest.fixture
def sixteen_bit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """The way of a GPU, with its one GEMM emulated; the dtypes of each product."""
    products = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        products.append((a.dtype, b.dtype))
        return a.float() @ b.float()

    def applies(x: Tensor, weight: Tensor) -> bool:
        return x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)

    monkeypatch.setattr(module, "_multiply", multiply)
    monkeypatch.setattr(module, "_multiplies_as_they_are", applies)
    return products


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_against_loops(shape: tuple[int, int, int], biased: bool, poisoned_memory: None) -> None:
    dtypes = (torch.float64, torch.float64, torch.float64 if biased else None)
    inputs = inputs_of(shape, dtypes)
    num_tokens, hidden, num_experts = shape
    d_TE = torch.randn(num_tokens, num_experts, dtype=torch.float64)
    x, w = (value.tolist() for value in inputs[:2])
    b = inputs[2].tolist() if biased else [0.0] * num_experts
    d, T, H, E = d_TE.tolist(), range(num_tokens), range(hidden), range(num_experts)
    want = [
        [[b[e] + sum(x[t][h] * w[e][h] for h in H) for e in E] for t in T],
        [[sum(d[t][e] * w[e][h] for e in E) for h in H] for t in T],
        [[sum(d[t][e] * x[t][h] for t in T) for h in H] for e in E],
        [sum(d[t][e] for t in T) for e in E],
    ]
    sizes = [d_TE.shape, *(value.shape for value in inputs)]
    for function in (router_logits, router_logits_reference):
        got = everything(function, inputs, d_TE)
        assert len(got) == 3 + biased
        for value, expected, size in zip(got, want, sizes):
            expected = torch.tensor(expected, dtype=torch.float64).view(size)
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    for bias in (None, torch.float64):
        inputs = inputs_of((3, 5, 4), (torch.float64, torch.float64, bias))
        for function in (router_logits, router_logits_reference):
            assert torch.autograd.gradcheck(function, tuple(inputs))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_same_bits_as_the_definition(dtypes: Any, poisoned_memory: None) -> None:
    """Of every dtype and every mixture; gradients too, in the dtypes of their inputs."""
    inputs = inputs_of((6, 40, 9), dtypes)
    got, want = (everything(f, inputs) for f in (router_logits, router_logits_reference))
    assert got[0].dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    for ours, theirs in zip(got, want):
        assert ours.is_contiguous()
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_layer_gives_the_bits_of_a_linear_layer(dtype: torch.dtype, biased: bool) -> None:
    router = layers.Router(48, 12, 2, bias=biased, dtype=dtype)
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    inputs = [torch.randn(31, 48).to(dtype).requires_grad_(), *router.parameters()]
    got = everything(lambda x, *_: router(x).router_logits, inputs)
    for ours, theirs in zip(got, everything(router_logits_reference, inputs)):
        assert_same_bits(ours, theirs)


def test_every_set_of_gradients() -> None:
    x_TH, weight_EH, bias_E = (
        value.detach() for value in inputs_of((5, 6, 4), (torch.bfloat16,) * 3)
    )
    values = [x_TH, weight_EH, bias_E]
    whole = everything(router_logits, [value.clone().requires_grad_() for value in values])[1:]
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        some = [v.clone().requires_grad_(i in chosen) for i, v in enumerate(values)]
        out_TE = router_logits(*some)
        torch.manual_seed(1)
        grads = torch.autograd.grad(out_TE, [some[i] for i in chosen], torch.randn_like(out_TE))
        for i, grad in zip(chosen, grads):
            assert_same_bits(grad, whole[i])
    assert not router_logits(*values).requires_grad


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_what_is_saved(dtypes: Any) -> None:
    """x and weight themselves, and nothing else."""
    inputs = inputs_of((5, 8, 3), dtypes)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        logits_TE = router_logits(*inputs)
    assert [(t.data_ptr(), t.dtype) for t in saved] == [(t.data_ptr(), t.dtype) for t in inputs[:2]]
    logits_TE.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    inputs = inputs_of((5, 64, 7), (dtype, torch.float32, torch.float32))
    want = everything(router_logits, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = everything(router_logits, inputs)
    for ours, theirs in zip(got, want):
        assert_same_bits(ours, theirs)


def test_strides_and_expanded_gradients() -> None:
    """Every other row, transposed, one row repeated, a part of a wider tensor; gradients of stride 0."""
    plain_TH, weight_EH = torch.randn(6, 8), torch.randn(5, 8)
    for x_TH, w_EH in zip(views_of(plain_TH), views_of(weight_EH)):
        for d_TE in (torch.ones(()).expand(6, 5), torch.randn(5, 6).t(), torch.randn(1, 5)):
            d_TE = d_TE.expand(6, 5)
            got = everything(router_logits, [x_TH, w_EH], d_TE)
            copies = [value.detach().contiguous().requires_grad_() for value in (x_TH, w_EH)]
            want = everything(router_logits_reference, copies, d_TE.contiguous())
            for ours, theirs in zip(got, want):
                assert ours.is_contiguous()
                torch.testing.assert_close(ours, theirs)


def views_of(plain: Tensor) -> list[Tensor]:
    views = [
        plain.repeat_interleave(2, dim=0)[::2],
        plain.t().contiguous().t(),
        plain[:1].expand(plain.shape),
        torch.cat([plain, plain], dim=1)[:, 3:11],
    ]
    return [view.detach().requires_grad_() for view in views]


@pytest.mark.parametrize("shape", [(6, 40, 9), (1, 1, 1), (0, 4, 3), (4, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_16_bit_tokens(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    biased: bool,
    sixteen_bit: list[tuple[torch.dtype, torch.dtype]],
    poisoned_memory: None,
) -> None:
    """Logits as exact as in fp32; gradients off by a rounding and no more than 2^-15 of their terms."""
    inputs = inputs_of(shape, (dtype, dtype, dtype if biased else None))
    exact = [value.detach().double().requires_grad_() for value in inputs]
    d_TE = torch.randn(shape[0], shape[2])
    got = everything(router_logits, inputs, d_TE)
    want = everything(router_logits_reference, exact, d_TE.double())
    assert sixteen_bit == [(dtype, dtype)] * (2 if dtype == torch.bfloat16 else 1)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
    magnitudes = everything(router_logits_reference, [v.abs() for v in exact], d_TE.double().abs())
    for ours, theirs, terms, value in zip(got[1:], want[1:], magnitudes[1:], inputs):
        assert ours.dtype == dtype and ours.shape == value.shape and ours.is_contiguous()
        half = 0.5 * torch.finfo(dtype).eps * theirs.abs() + torch.finfo(dtype).tiny
        assert ((ours.double() - theirs).abs() <= half + 2**-15 * terms).all()


def test_halves_hold_a_gradient_to_16_bits() -> None:
    d_TE = torch.randn(64, 7) * 2.0 ** torch.randint(-100, 101, (64, 7))
    halves = module._halves(d_TE)
    assert halves.dtype == torch.bfloat16 and halves.is_contiguous()
    hi_TE, lo_TE = halves.double().chunk(2, dim=1)
    assert torch.equal(hi_TE, d_TE.bfloat16().double())
    assert ((hi_TE + lo_TE - d_TE).abs() <= 2.0**-17 * d_TE.abs()).all()
    assert ((hi_TE - d_TE).abs() > 2.0**-12 * d_TE.abs()).any()  # one half would not do


def test_integers_come_out_exact(sixteen_bit: Any) -> None:
    """Sums of up to 24 bits: exact in fp32 and in two halves, not in one."""
    inputs = [
        integers(50, 64, dtype=torch.bfloat16, bound=100).requires_grad_(),
        integers(16, 64, dtype=torch.bfloat16, bound=2).requires_grad_(),
    ]
    d_TE = integers(50, 16, dtype=torch.float32, bound=2**15)
    got = everything(router_logits, inputs, d_TE)
    want = everything(router_logits_reference, inputs, d_TE)
    for ours, theirs in zip(got, want):
        assert_same_bits(ours, theirs)


def test_the_16_bit_way_is_for_equal_dtypes_on_a_gpu_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpu:
        def __init__(self, dtype: torch.dtype) -> None:
            self.is_cuda, self.dtype, self.device = True, dtype, torch.device("cuda", 0)

    applies: Any = module._multiplies_as_they_are
    monkeypatch.setattr(module, "_has_16_bit_gemm", lambda device: True)
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
    for x in FLOATS:
        assert not applies(torch.zeros(2, 2, dtype=x), torch.zeros(2, 2, dtype=x))
        for weight in FLOATS:
            equal = x == weight and x in (torch.bfloat16, torch.float16)
            assert applies(OnGpu(x), OnGpu(weight)) == equal
    try:
        flags.allow_fp16_accumulation = True
        assert not applies(OnGpu(torch.float16), OnGpu(torch.float16))
        assert applies(OnGpu(torch.bfloat16), OnGpu(torch.bfloat16))
    finally:
        flags.allow_fp16_accumulation = before
    monkeypatch.setattr(module, "_has_16_bit_gemm", lambda device: False)
    assert not applies(OnGpu(torch.bfloat16), OnGpu(torch.bfloat16))


@pytest.mark.parametrize("dtypes", [(torch.float64,) * 3, (torch.bfloat16, torch.float32, None)])
def test_opcheck(dtypes: Any) -> None:
    inputs = inputs_of((5, 8, 3), dtypes)
    args = (*inputs, *[None] * (3 - len(inputs)))
    torch.library.opcheck(torch.ops.tokenyard.router_logits, args)
    d_TE = torch.randn_like(router_logits(*inputs))
    saved = [value.detach() for value in inputs[:2]]
    for needed in ((True, True, True), (False, True, False), (True, False, False)):
        torch.library.opcheck(torch.ops.tokenyard.router_logits_backward, (d_TE, *saved, *needed))


def test_opcheck_of_the_16_bit_way(sixteen_bit: Any) -> None:
    inputs = inputs_of((5, 8, 3), (torch.bfloat16,) * 3)
    torch.library.opcheck(torch.ops.tokenyard.router_logits, tuple(inputs))
    saved = [value.detach() for value in inputs[:2]]
    for needed in ((True, True, True), (False, True, False), (True, False, False)):
        args = (torch.randn(5, 3), *saved, *needed)
        torch.library.opcheck(torch.ops.tokenyard.router_logits_backward, args)
    assert sixteen_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile_does_not_depend_on_the_number_of_tokens(dtype: torch.dtype) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(router_logits, fullgraph=True, backend=counter)
    _, weight_EH, bias_E = inputs_of((3, 8, 5), (dtype,) * 3)
    for num_tokens in (3, 8, 21):
        x_TH = torch.randn(num_tokens, 8).to(dtype).requires_grad_()
        torch._dynamo.mark_dynamic(x_TH, 0)
        inputs = [x_TH, weight_EH, bias_E]
        for ours, theirs in zip(everything(compiled, inputs), everything(router_logits, inputs)):
            assert_same_bits(ours, theirs)
    assert counter.frame_count == 1


def test_any_backend_is_fine() -> None:
    inputs = inputs_of((5, 8, 3), (torch.float32,) * 3)
    want = router_logits(*inputs)
    for backend in ("reference", "triton"):
        with use(backend):
            assert_same_bits(router_logits(*inputs), want)


X_TH, WEIGHT_EH = torch.zeros(4, 3), torch.zeros(5, 3)
BAD: list[tuple[str, str, tuple[Any, ...]]] = [
    ("x", "a tensor", ([[1.0]], WEIGHT_EH)),
    ("x", "shape [T, H]", (torch.zeros(2, 4, 3), WEIGHT_EH)),
    ("x", "dtype in", (X_TH.int(), WEIGHT_EH)),
    ("x", "dtype in", (X_TH.to(torch.float8_e4m3fn), WEIGHT_EH)),
    ("weight", "a tensor", (X_TH, None)),
    ("weight", "shape [E, 3]", (X_TH, WEIGHT_EH.t())),
    ("weight", "shape [E, 3]", (X_TH, WEIGHT_EH[0])),
    ("weight", "dtype in", (X_TH, WEIGHT_EH.long())),
    ("weight", "device cpu", (X_TH, WEIGHT_EH.to("meta"))),
    ("bias", "a tensor", (X_TH, WEIGHT_EH, 1.0)),
    ("bias", "shape [5]", (X_TH, WEIGHT_EH, torch.zeros(1))),
    ("bias", "shape [5]", (X_TH, WEIGHT_EH, torch.zeros(5, 1))),
    ("bias", "dtype in", (X_TH, WEIGHT_EH, torch.zeros(5, dtype=torch.bool))),
    ("bias", "device cpu", (X_TH, WEIGHT_EH, torch.zeros(5, device="meta"))),
]


@pytest.mark.parametrize(("argument", "expected", "args"), BAD)
def test_bad_argument(argument: str, expected: str, args: tuple[Any, ...]) -> None:
    message = re.escape(f"tokenyard.router_logits: `{argument}`: expected {expected}")
    with pytest.raises(ArgumentError, match=message):
        router_logits(*args)
