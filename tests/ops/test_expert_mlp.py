"""expert_mlp against plain loops; gradients, memory, hazards, autocast, compilation, errors."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CALLS, SPECIAL, Case, assert_same_bits, random_case, routings
from hypothesis import given, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tokenyard
from tokenyard import ArgumentError, LoRA, RankTree

NAMES = ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def sigmoid(g: float) -> float:
    return 1 / (1 + math.exp(-g))


ACTIVATIONS: dict[str, Callable[..., float]] = {
    "swiglu": lambda g, up: g * sigmoid(g) * up,
    "geglu": lambda g, up: g * (1 + math.erf(g / math.sqrt(2))) / 2 * up,
    "clamped_swiglu": lambda g, up: (
        min(g, 7) * sigmoid(1.702 * min(g, 7)) * (max(-7, min(up, 7)) + 1)
    ),
    "relu2": lambda g: max(g, 0) ** 2,
}


def make(
    case: Case, hidden: int, size: int, dtype: torch.dtype, gated: bool = True, biased: bool = True
) -> dict[str, Tensor]:
    """Differentiable arguments in layout ENK."""
    columns, num_experts = (2 * size if gated else size), case.num_experts
    shapes = {
        "x": (case.num_tokens, hidden),
        "topk_weights": (case.num_tokens, case.top_k),
        "w_gate_up": (num_experts, columns, hidden),
        "w_down": (num_experts, hidden, size),
    }
    if biased:
        shapes |= {"b_gate_up": (num_experts, columns), "b_down": (num_experts, hidden)}
    return {name: torch.randn(s).to(dtype).requires_grad_() for name, s in shapes.items()}


def literal(case: Case, arguments: dict[str, Any], kind: str, interleaved: bool) -> Tensor:
    """out[t] = sum over k of w * (W2[e] activation(W1[e] x[t] + b1[e]) + b2[e]), number by number."""
    x, weights, w1, w2 = (arguments[name].tolist() for name in NAMES[:4])
    _, hidden, size = arguments["w_down"].shape
    columns = arguments["w_gate_up"].shape[1]
    b1 = arguments["b_gate_up"].tolist() if "b_gate_up" in arguments else [[0.0] * columns] * 999
    b2 = arguments["b_down"].tolist() if "b_down" in arguments else [[0.0] * hidden] * 999
    out_TH = torch.zeros(case.num_tokens, hidden, dtype=FP64)
    for t, slots in enumerate(case.rows_of_token()):
        for k, _, e in slots:
            z = [
                b1[e][c] + sum(w1[e][c][h] * x[t][h] for h in range(hidden)) for c in range(columns)
            ]
            pairs: Any = zip(z)
            if kind != "relu2":
                pairs = zip(z[::2], z[1::2]) if interleaved else zip(z[:size], z[size:])
            a = [ACTIVATIONS[kind](*pair) for pair in pairs]
            for h in range(hidden):
                y = b2[e][h] + sum(w2[e][h][i] * a[i] for i in range(size))
                out_TH[t, h] += weights[t][k] * y
    return out_TH


def factors(
    num_experts: int, hidden: int, size: int, dtype: torch.dtype, rank: int = 2, gated: bool = True
) -> dict[str, LoRA]:
    """Differentiable low-rank additions to both matrices."""

    def lora(size_in: int, size_out: int, scale: float) -> LoRA:
        a, b = torch.randn(num_experts, rank, size_in), torch.randn(num_experts, size_out, rank)
        return LoRA(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), scale)

    columns = 2 * size if gated else size
    return {"lora_gate_up": lora(hidden, columns, 0.5), "lora_down": lora(size, hidden, 2.0)}


def run(
    case: Case, arguments: dict[str, Tensor], function: Any = tokenyard.expert_mlp, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    out_TH = function(routing=case.route(), **arguments, **options)
    torch.manual_seed(7)
    grad_TH = torch.randn(out_TH.shape).to(out_TH.dtype)
    leaves = [value for value in arguments.values() if value.requires_grad]
    attached = function is tokenyard.expert_mlp  # the definition may leave out what nothing reaches
    grads = torch.autograd.grad(
        out_TH, leaves, grad_TH, allow_unused=not attached, materialize_grads=not attached
    )
    return out_TH, grads, grad_TH


@settings(max_examples=30)
@given(routings(max_tokens=4))
def test_equals_the_loops_and_autograd(case: Case) -> None:
    kind = random.choice(list(ACTIVATIONS))
    interleaved, transposed, recompute = (random.random() < 0.5 for _ in range(3))
    arguments = make(case, 3, 2, FP64, gated=kind != "relu2", biased=random.random() < 0.5)
    want_TH = literal(case, arguments, kind, interleaved)
    options = {
        "activation": kind,
        "gate_up_layout": "interleaved" if interleaved else "concatenated",
        "weight_layout": "EKN" if transposed else "ENK",
    }
    if transposed:
        for name in ("w_gate_up", "w_down"):
            stored = arguments[name].detach().transpose(1, 2)
            arguments[name] = random.choice([stored, stored.contiguous()]).requires_grad_()
    out_TH, grads, _ = run(case, arguments, recompute=recompute, **options)
    reference_TH, wanted, _ = run(case, arguments, tokenyard.expert_mlp_reference, **options)
    torch.testing.assert_close(out_TH, want_TH)
    torch.testing.assert_close(reference_TH, want_TH)
    for got, want in zip(grads, wanted):
        torch.testing.assert_close(got, want)


@settings(max_examples=30)
@given(routings(max_tokens=4))
def test_weights_on_the_input_and_low_rank_additions(case: Case) -> None:
    """Against experts whose matrices have the additions in them, on one token's weighted input at a time."""
    kind = random.choice(list(ACTIVATIONS))
    gated, on_input, recompute = kind != "relu2", random.random() < 0.7, random.random() < 0.5
    layout = random.choice(["ENK", "EKN"])
    arguments = make(case, 3, 2, FP64, gated=gated, biased=random.random() < 0.5)
    loras = factors(case.num_experts, 3, 2, FP64, gated=gated)
    merged = {
        name: (arguments[name] + lora.scale * lora.b @ lora.a).detach()
        for name, lora in zip(("w_gate_up", "w_down"), loras.values())
    }
    biases = {name: arguments[name] for name in ("b_gate_up", "b_down") if name in arguments}
    x_TH, weights_TK = arguments["x"], arguments["topk_weights"]
    want_TH = torch.zeros_like(x_TH)
    for t, slots in enumerate(case.rows_of_token()):
        for k, _, e in slots:
            w = weights_TK[t, k].detach()
            x_H = x_TH[t] * w if on_input else x_TH[t]
            z = merged["w_gate_up"][e] @ x_H + (biases["b_gate_up"][e] if biases else 0)
            a = tokenyard.activation_reference(z[None], kind)[0]  # type: ignore[arg-type]
            y = merged["w_down"][e] @ a + (biases["b_down"][e] if biases else 0)
            want_TH[t] = want_TH[t] + (y if on_input else w * y)
    if layout == "EKN":
        for name in merged:
            arguments[name] = arguments[name].detach().transpose(1, 2).requires_grad_()
    leaves = [*arguments.values(), *(value for lora in loras.values() for value in lora[:2])]
    options: Any = {
        "routing": case.route(),
        "activation": kind,
        "weight_layout": layout,
        "weights_on": "input" if on_input else "output",
    }
    out_TH = tokenyard.expert_mlp(**arguments, **loras, **options, recompute=recompute)
    reference_TH = tokenyard.expert_mlp_reference(**arguments, **loras, **options)
    torch.testing.assert_close(out_TH, want_TH)
    torch.testing.assert_close(reference_TH, want_TH)
    grad_TH = torch.randn_like(out_TH)
    grads = torch.autograd.grad(out_TH, leaves, grad_TH)
    wanted = torch.autograd.grad(
        reference_TH, leaves, grad_TH, allow_unused=True, materialize_grads=True
    )
    for got, want in zip(grads, wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("trained", ["everything", "factors", "x", "topk_weights"])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_of_a_part(trained: str, on_input: bool) -> None:
    """Frozen weights get none; what is asked for is the same as when all is."""
    case = SPECIAL["aligned"]
    arguments, loras = make(case, 4, 3, FP64), factors(case.num_experts, 4, 3, FP64)
    leaves = arguments | {f"{n}.{f}": getattr(loras[n], f) for n in loras for f in ("a", "b")}
    options: Any = {"routing": case.route(), "weights_on": "input" if on_input else "output"}
    grad_TH = torch.randn(4, 4, dtype=FP64)
    reference_TH = tokenyard.expert_mlp_reference(**arguments, **loras, **options)
    wanted = dict(zip(leaves, torch.autograd.grad(reference_TH, list(leaves.values()), grad_TH)))
    for name, leaf in leaves.items():
        leaf.requires_grad_(
            trained in ("everything", name) or (trained == "factors" and "." in name)
        )
    tokenyard.expert_mlp(**arguments, **loras, **options).backward(grad_TH)
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (not leaf.requires_grad)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, wanted[name])


def test_low_rank_additions_follow_autocast_and_save_nothing_more() -> None:
    case = random_case(16, 3, 2)
    arguments, loras = make(case, 8, 5, FP32), factors(3, 8, 5, FP32)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", BF16):
        out_TH = tokenyard.expert_mlp(routing=case.route(), **arguments, **loras)
    assert out_TH.dtype == BF16
    assert sum(t.shape == (32, 10) for t in saved) == 1
    assert not any(t.shape[0] == 32 and t.dim() == 2 and t.shape != (32, 10) for t in saved)
    out_TH.sum().backward()
    assert all(lora.a.grad.dtype == lora.b.grad.dtype == FP32 for lora in loras.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_applied_later(backend: str, recompute: bool) -> None:
    """The outputs as with weights of one, and the gradients of the weighted outputs, bit for bit."""
    case = random_case(12, 3, 1)
    arguments = make(case, 8, 5, FP32)
    ones = arguments | {"topk_weights": torch.ones_like(arguments["topk_weights"])}
    with tokenyard.use(backend):
        later_TH, got, _ = run(case, arguments, weights_on="later", recompute=recompute)
        _, want, _ = run(case, arguments)
        plain_TH, _, _ = run(case, ones)
    assert_same_bits(later_TH, plain_TH)
    for ours, theirs in zip(got, want):
        assert_same_bits(ours, theirs)
    reference_TH = tokenyard.expert_mlp_reference(
        routing=case.route(), weights_on="later", **arguments
    )
    torch.testing.assert_close(later_TH, reference_TH)


def test_partial_sums_are_in_fp32() -> None:
    """Of bf16 rows: rounded, they are the sum of one rank; the gradient is rounded before."""
    case = random_case(12, 4, 3)
    arguments = make(case, 8, 5, BF16)
    part_TH, got, grad_TH = run(case, arguments, reduction=RankTree(1, "fp32", "none"))
    whole_TH, want, _ = run(case, arguments, reduction=RankTree(1))
    assert part_TH.dtype == FP32 and grad_TH.dtype == FP32
    assert_same_bits(part_TH.to(BF16), whole_TH)
    assert not torch.equal(part_TH, whole_TH)
    for ours, theirs in zip(got, want):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("name", ["aligned", "nothing routed", "no tokens", "rows too few"])
@pytest.mark.parametrize("kind", ["swiglu", "clamped_swiglu", "relu2"])
def test_gradcheck(name: str, kind: str) -> None:
    case = SPECIAL[name]
    values = make(case, 2, 2, FP64, gated=kind != "relu2")

    def function(*inputs: Tensor) -> Tensor:
        named = dict(zip(NAMES, inputs))
        return tokenyard.expert_mlp(
            routing=case.route(), activation=kind, reduction=RankTree(1), recompute=True, **named
        )

    assert torch.autograd.gradcheck(function, list(values.values()))


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_special_routings_leave_nothing_unwritten(name: str, recompute: bool) -> None:
    case = SPECIAL[name]
    arguments = make(case, 4, 3, FP32)
    routed = {(t, k): e for t, slots in enumerate(case.rows_of_token()) for k, _, e in slots}
    with torch.no_grad():
        for t in range(case.num_tokens):
            for k in range(case.top_k):
                if (t, k) not in routed:
                    arguments["topk_weights"][t, k] = random.choice([math.nan, math.inf])
            if not case.rows_of_token()[t]:
                arguments["x"][t] = math.nan
    out_TH, grads, _ = run(case, arguments, recompute=recompute)
    torch.testing.assert_close(out_TH, literal(case, arguments, "swiglu", False).float())
    wanted = run(case, arguments, tokenyard.expert_mlp_reference)[1]
    for got, want in zip(grads, wanted):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want)
    empty = sorted(set(range(case.num_experts)) - set(routed.values()))
    assert all((gradient[empty] == 0).all() for gradient in grads[2:])
    assert all(grads[1][t, k] == 0 for t in range(case.num_tokens) for k in range(case.top_k)
               if (t, k) not in routed)  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
@pytest.mark.parametrize("hidden, num_experts, top_k", [(1, 1, 1), (20, 6, 6), (33, 60, 22)])
def test_precision(dtype: torch.dtype, hidden: int, num_experts: int, top_k: int) -> None:
    """Within a few roundings of fp64; routing weights in fp32 whatever the dtype of x."""
    case = random_case(9, num_experts, top_k)
    arguments = make(case, hidden, 5, dtype)
    arguments["topk_weights"] = torch.rand(9, top_k, requires_grad=True)
    exact = {n: value.detach().double().requires_grad_() for n, value in arguments.items()}
    out_TH, grads, _ = run(case, arguments)
    torch.manual_seed(7)
    grad_TH = torch.randn(out_TH.shape).to(dtype).double()
    want_TH = tokenyard.expert_mlp_reference(routing=case.route(), **exact)
    wanted = torch.autograd.grad(want_TH, list(exact.values()), grad_TH)
    assert grads[1].dtype == FP32
    for got, want in zip((out_TH, *grads), (want_TH, *wanted)):
        error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_saved_memory(recompute: bool, biased: bool) -> None:
    case = random_case(7, 3, 2, row_alignment=4)
    arguments, routing = make(case, 6, 5, BF16, biased=biased), case.route()
    given = [*arguments.values(), *(getattr(routing, n) for n in vars(routing))]
    owned = {g.untyped_storage().data_ptr() for g in given if isinstance(g, Tensor)}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tokenyard.expert_mlp(routing=routing, **arguments, recompute=recompute)
    extra = [t for t in saved if t.numel() and t.untyped_storage().data_ptr() not in owned]
    assert [list(t.shape) for t in extra] == ([] if recompute else [[routing.num_rows, 10]])
    assert all(t.dtype == BF16 for t in extra)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [(), NAMES[2:], ("x",), ("w_down", "topk_weights"), NAMES[1:3]])
def test_no_gradient_is_computed_for_what_is_frozen(
    frozen: tuple[str, ...], recompute: bool
) -> None:
    """Counted in multiplications of the GEMMs; in fp64, of which none is done for padding."""
    case = random_case(8, 3, 2)
    arguments = make(case, 4, 5, FP64)
    wanted = dict(zip(NAMES, run(case, arguments)[1]))
    for name in frozen:
        arguments[name].requires_grad_(False)
    rows, hidden, size = sum(map(len, case.rows_of_token())), 4, 5
    gate_up, down = 2 * rows * hidden * 2 * size, 2 * rows * size * hidden
    expected = down + gate_up * recompute  # d_a, and z again
    expected += (gate_up if "x" not in frozen else 0) + (down if "w_down" not in frozen else 0)
    expected += gate_up if "w_gate_up" not in frozen else 0
    out_TH = tokenyard.expert_mlp(routing=case.route(), **arguments, recompute=recompute)
    torch.manual_seed(7)
    grad_TH = torch.randn(out_TH.shape).to(FP64)
    with FlopCounterMode(display=False) as counter:
        out_TH.backward(grad_TH)
    assert abs(counter.get_total_flops() - expected) <= 4 * rows * hidden  # d_b_down: dot products
    for name, value in arguments.items():
        if name in frozen:
            assert value.grad is None
        else:
            torch.testing.assert_close(value.grad, wanted[name])


def test_nothing_is_kept_without_grad() -> None:
    case = SPECIAL["aligned"]
    arguments = make(case, 4, 3, FP32)
    with torch.no_grad():
        assert not tokenyard.expert_mlp(routing=case.route(), **arguments).requires_grad


def test_strides() -> None:
    case = SPECIAL["aligned"]
    arguments = make(case, 4, 3, FP64)
    want = run(case, arguments)
    odd = {}
    for name, value in arguments.items():
        padded = torch.full((*value.shape[:-1], 2 * value.shape[-1]), math.nan, dtype=FP64)
        odd[name] = padded[..., ::2].copy_(value.detach()).requires_grad_()
    odd["x"] = arguments["x"].detach().t().contiguous().t().requires_grad_()
    got = run(case, odd)
    for first, second in zip((got[0], *got[1]), (want[0], *want[1])):
        torch.testing.assert_close(first, second)


def test_autocast() -> None:
    """Activations and expert weights follow autocast, routing weights stay; the backward may run inside."""
    case = random_case(16, 3, 2)
    arguments = make(case, 8, 5, FP32)
    halves = {
        n: v if n == "topk_weights" else v.detach().to(BF16).requires_grad_()
        for n, v in arguments.items()
    }
    want_TH, wanted, grad_TH = run(case, halves)
    with torch.autocast("cpu", BF16):
        out_TH = tokenyard.expert_mlp(routing=case.route(), **arguments)
        leaves = list(arguments.values())
        inside = torch.autograd.grad(out_TH, leaves, grad_TH, retain_graph=True)
    outside = torch.autograd.grad(out_TH, leaves, grad_TH)
    assert_same_bits(out_TH, want_TH)
    for where, grads in {"outside": outside, "inside": inside}.items():
        for name, got, want in zip(NAMES, grads, wanted):
            assert got.dtype == FP32
            assert torch.equal(got, want.float()), (where, name)


def test_backward_inside_autocast_of_a_forward_outside() -> None:
    case = random_case(16, 3, 2)
    arguments = make(case, 8, 5, FP32)
    out_TH, wanted, grad_TH = run(case, arguments)
    out_TH = tokenyard.expert_mlp(routing=case.route(), **arguments)
    with torch.autocast("cpu", BF16):
        grads = torch.autograd.grad(out_TH, list(arguments.values()), grad_TH)
    for got, want in zip(grads, wanted):
        assert_same_bits(got, want)


@pytest.mark.parametrize(
    "keep, biased, transposed", [(True, True, False), (False, False, False), (True, True, True)]
)
def test_opcheck(keep: bool, biased: bool, transposed: bool) -> None:
    case = SPECIAL["aligned"]
    routing, arguments = case.route(), make(case, 4, 3, FP32, biased=biased)
    inputs: list[Any] = [arguments.get(name) for name in NAMES]
    inputs += (
        [value for lora in factors(4, 4, 3, FP32).values() for value in lora[:2]]
        if biased
        else [None] * 4
    )
    if transposed:
        for i in (2, 3):
            inputs[i] = inputs[i].detach().transpose(1, 2).contiguous().transpose(1, 2)
            inputs[i].requires_grad_()
    maps = (routing.topk_indices, routing.row_of_slot, routing.slot_of_row)
    groups = (routing.expert_offsets, routing.tokens_per_expert)
    options = ("swiglu", "concatenated", "ENK", "output" if biased else "input", 0.5, 2.0)
    forward = (*inputs, *maps, *groups, *options, "slot", 0, "fp32", "fp32")
    torch.library.opcheck(torch.ops.tokenyard.expert_mlp.default, (*forward, keep))
    inputs = [value if value is None else value.detach() for value in inputs]
    kept = torch.randn(20, 6) if keep else torch.empty(0)
    need = [True, keep, True, True, *[biased] * 6]
    backward = (torch.randn(4, 4), *inputs, kept, *maps, *groups, *options, need)
    torch.library.opcheck(torch.ops.tokenyard.expert_mlp_backward.default, backward)


def test_compile_once_for_every_number_of_tokens() -> None:
    call = CALLS["expert_mlp, biases"]
    torch._dynamo.reset()  # compilations of a code object are counted
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 9, 16):
        routing = random_case(num_tokens, 3, 2).route()
        inputs = call.inputs(routing, FP32)
        stance = "default" if num_tokens == 5 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            out_TH = compiled(routing, *inputs)
            grads = torch.autograd.grad(out_TH.sum(), inputs)
        want_TH = call(routing, *inputs)
        assert_same_bits(out_TH, want_TH)
        for got, want in zip(grads, torch.autograd.grad(want_TH.sum(), inputs)):
            assert_same_bits(got, want)


@pytest.mark.parametrize(
    "argument, changes",
    [
        ("x", {"x": torch.zeros(3, 4)}),
        ("x", {"x": torch.zeros(4, 4, dtype=torch.int64)}),
        ("x", {"x": None}),
        ("routing", {"routing": None}),
        ("topk_weights", {"topk_weights": torch.zeros(4, 3)}),
        ("topk_weights", {"topk_weights": None}),
        ("topk_weights", {"topk_weights": torch.zeros(4, 2, dtype=torch.int32)}),
        ("w_gate_up", {"w_gate_up": torch.zeros(4, 6, 5)}),
        ("w_gate_up", {"w_gate_up": torch.zeros(5, 6, 4)}),
        ("w_gate_up", {"w_gate_up": torch.zeros(4, 5, 4)}),
        ("w_gate_up", {"w_gate_up": torch.zeros(4, 6, 4, dtype=FP64)}),
        ("w_down", {"w_down": torch.zeros(4, 3, 4)}),
        ("w_down", {"w_down": torch.zeros(4, 4, 3, dtype=BF16)}),
        ("w_down", {"w_down": torch.zeros(4, 4, 3, device="meta")}),
        ("w_down", {"activation": "silu"}),
        ("b_gate_up", {"b_gate_up": torch.zeros(4, 3)}),
        ("b_gate_up", {"b_gate_up": torch.zeros(4, 6, dtype=BF16)}),
        ("b_down", {"b_down": torch.zeros(4, 3)}),
        ("b_down", {"b_down": torch.zeros(4, 4, device="meta")}),
        ("activation", {"activation": "mish"}),
        ("weights_on", {"weights_on": "both"}),
        ("lora_down", {"lora_down": (torch.zeros(4, 2, 3), torch.zeros(4, 4, 2))}),
        (r"lora_down\.a", {"lora_down": LoRA(torch.zeros(4, 2, 4), torch.zeros(4, 4, 2))}),
        (r"lora_down\.b", {"lora_down": LoRA(torch.zeros(4, 2, 3), torch.zeros(4, 4, 1))}),
        (r"lora_gate_up\.b", {"lora_gate_up": LoRA(torch.zeros(4, 2, 4), torch.zeros(4, 4, 2))}),
        (r"lora_gate_up\.scale", {"lora_gate_up": LoRA(torch.zeros(4, 2, 4), torch.zeros(4, 6, 2), "1")}),
        ("weights_on", {"weights_on": "input", "reduction": RankTree(2, "fma_bf16")}),
        ("weights_on", {"weights_on": "later"}),
        ("gate_up_layout", {"gate_up_layout": "mixed"}),
        ("weight_layout", {"weight_layout": "NK"}),
        ("reduction", {"reduction": "tree"}),
        (r"reduction\.ep_size", {"reduction": RankTree(3)}),
        ("x", {n: torch.zeros(s, dtype=FP64) for n, s in zip(NAMES, [(4, 4), (4, 2), (4, 6, 4), (4, 4, 3)])}
         | {"reduction": RankTree(2, "fma_bf16")}),
    ],
)  # fmt: skip
def test_errors_name_operator_and_argument(argument: str, changes: dict[str, Any]) -> None:
    arguments = {"routing": SPECIAL["aligned"].route(), "x": torch.zeros(4, 4)}
    arguments |= {"topk_weights": torch.zeros(4, 2), "w_gate_up": torch.zeros(4, 6, 4)}
    arguments |= {"w_down": torch.zeros(4, 4, 3)} | changes
    with pytest.raises(ArgumentError, match=rf"tokenyard\.expert_mlp: `{argument}`"):
        tokenyard.expert_mlp(**arguments)


def test_the_error_of_a_weight_names_an_argument_of_the_operator() -> None:
    arguments = make(SPECIAL["aligned"], 4, 3, FP32) | {"w_down": torch.zeros(4, 4, 3, dtype=FP64)}
    with pytest.raises(ArgumentError, match=r"`w_down`: expected .*, the dtype of `x`, got"):
        tokenyard.expert_mlp(routing=SPECIAL["aligned"].route(), **arguments)


def test_compile_by_inductor_with_weights_stored_transposed() -> None:
    """The gradients have the strides that were promised to the compiler."""
    case = random_case(9, 3, 2)
    arguments = make(case, 4, 3, FP32)
    for name in ("w_gate_up", "w_down"):
        stored = arguments[name].detach().transpose(1, 2).contiguous()
        arguments[name] = stored.transpose(1, 2).requires_grad_()
    compiled = torch.compile(tokenyard.expert_mlp, fullgraph=True)
    out_TH = compiled(routing=case.route(), **arguments)
    want_TH, wanted, grad_TH = run(case, arguments)
    torch.testing.assert_close(out_TH, want_TH)
    for got, want in zip(torch.autograd.grad(out_TH, list(arguments.values()), grad_TH), wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["no tokens", "nothing routed", "no rows"])
def test_the_definition_stays_attached(name: str) -> None:
    """A rank that gets no token still runs its backward."""
    case = SPECIAL[name]
    for function in (tokenyard.expert_mlp, tokenyard.expert_mlp_reference):
        arguments = make(case, 4, 3, FP32)
        function(routing=case.route(), **arguments).sum().backward()
        for value in arguments.values():
            assert value.grad is not None and (value.grad == 0).all()
