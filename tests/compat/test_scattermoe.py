"""The drop-in for scattermoe, against loops over the documented rules."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FLOATS, assert_same_bits
from compat.id_maps import combine
from torch import Tensor, nn
from torch.autograd import gradcheck

from tokenyard import ArgumentError
from tokenyard.compat import scattermoe

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
T, E, K, D, N = 5, 4, 2, 3, 2
S = T * K


def random_ids(*, absent: bool = False) -> Tensor:
    """Expert 1 is empty, token 0 has a duplicate; with `absent` the ids -1 and E, too."""
    ids = torch.tensor([0, 2, 3])[torch.randint(3, (T, K))]
    ids[0] = 2
    if absent:
        ids[1], ids[3, 1] = torch.tensor([-1, 0]), E
    return ids


def slots_of(ids: Tensor) -> list[int]:
    """The slot of every row that has one."""
    flat = ids.flatten().tolist()
    return [s for e in range(E) for s, expert in enumerate(flat) if expert == e]


def linear_loop(
    inputs: Tensor,
    weights: Tensor,
    k: int,
    ids: Tensor,
    biases: Tensor | None,
    gates: Tensor | None,
    grouped_in: bool,
    grouped_out: bool,
) -> Tensor:
    """`parallel_linear` by its definition, differentiable."""
    flat, slots = ids.flatten().tolist(), slots_of(ids)
    out = [inputs.new_zeros(weights.shape[2])] * len(flat)
    for row, slot in enumerate(slots):
        y = inputs[row if grouped_in else slot // k] @ weights[flat[slot]]
        if biases is not None:
            y = y + biases[flat[slot]]
        out[row if grouped_out else slot] = y
    if gates is None:
        return torch.stack(out)
    fan = gates.shape[1]
    sums = [sum(gates[g, f] * out[g * fan + f] for f in range(fan)) for g in range(len(gates))]
    return torch.stack(sums)  # type: ignore[arg-type]


# (k, grouped_in, grouped_out, the gates of a sum), all that make sense
KINDS = [
    (k, grouped_in, grouped_out, fan)
    for k, grouped_in, grouped_out, fan in itertools.product(
        (1, K), (False, True), (False, True), (None, 1, K)
    )
    if not (grouped_in and k > 1) and not (grouped_out and fan)
]


def linear_arguments(
    k: int, fan: int | None, bias: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    inputs, weights = torch.randn(S // k, D).to(dtype), torch.randn(E, D, N).to(dtype)
    biases = torch.randn(E, N).to(dtype).requires_grad_() if bias else None
    gates = None if fan is None else torch.rand(S // fan, fan).to(dtype).requires_grad_()
    return inputs.requires_grad_(), weights.requires_grad_(), biases, gates


@pytest.mark.parametrize("dtype", INTEGERS)
def test_flatten_sort_count(dtype: torch.dtype) -> None:
    ids = random_ids().to(dtype)
    experts, slots, ends = scattermoe.flatten_sort_count(ids, E)
    want = slots_of(ids)
    assert (experts.dtype, slots.dtype, ends.dtype) == (dtype, torch.int64, torch.int64)
    assert slots.tolist() == want
    assert experts.tolist() == ids.flatten()[want].tolist()
    assert ends.tolist() == [int((ids <= e).sum()) for e in range(E)]
    for got, value in zip(scattermoe.flatten_sort_count(ids.flatten(), E), (experts, slots, ends)):
        assert_same_bits(got, value)


def test_flatten_sort_count_with_absent_experts() -> None:
    ids = random_ids(absent=True)
    experts, slots, ends = scattermoe.flatten_sort_count(ids, E)
    want = slots_of(ids)
    assert slots.tolist() == [*want, -1, -1]
    assert experts.tolist() == [*ids.flatten()[want].tolist(), -1, -1]
    assert int(ends[-1]) == S - 2


def test_flatten_sort_count_without_tokens() -> None:
    experts, slots, ends = scattermoe.flatten_sort_count(torch.zeros(0, K, dtype=torch.int64), E)
    assert experts.shape == slots.shape == (0,) and ends.tolist() == [0] * E


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k, grouped_in, grouped_out, fan", KINDS)
def test_parallel_linear(
    k: int, grouped_in: bool, grouped_out: bool, fan: int | None, bias: bool, absent: bool
) -> None:
    ids = random_ids(absent=absent)
    groups = scattermoe.flatten_sort_count(ids, E)
    inputs, weights, biases, gates = linear_arguments(k, fan, bias)

    def call(*values: Tensor | None) -> Tensor:
        x, w, b, g = values
        assert x is not None and w is not None
        return scattermoe.parallel_linear(x, w, k, *groups, b, g, grouped_in, grouped_out)

    values = (inputs, weights, biases, gates)
    out = call(*values)
    want = linear_loop(inputs, weights, k, ids, biases, gates, grouped_in, grouped_out)
    torch.testing.assert_close(out, want)
    given = [value for value in values if value is not None]
    grad = torch.randn_like(want)
    got = torch.autograd.grad(out, given, grad)
    for value, expected in zip(got, torch.autograd.grad(want, given, grad)):
        torch.testing.assert_close(value, expected)
    assert (got[1][1] == 0).all()
    assert gradcheck(call, values)


def test_rows_past_the_last_expert_are_not_read() -> None:
    groups = scattermoe.flatten_sort_count(random_ids(absent=True), E)
    inputs, weights, biases, gates = linear_arguments(1, K, True)
    with torch.no_grad():
        inputs[-2:] = gates[1, 0] = gates[3, 1] = math.nan
    out = scattermoe.parallel_linear(
        inputs, weights, 1, *groups, biases, gates=gates, grouped_in=True
    )
    assert out.isfinite().all()
    d_inputs, d_weights, d_gates = torch.autograd.grad(out.sum(), (inputs, weights, gates))
    assert (d_inputs[-2:] == 0).all() and d_weights.isfinite().all() and d_gates.isfinite().all()
    assert d_gates[1, 0] == d_gates[3, 1] == 0


def test_order_of_the_peer() -> None:
    """Its sort leaves the rows of one expert in any order."""
    ids = random_ids()
    experts, slots, ends = scattermoe.flatten_sort_count(ids, E)
    shuffle = torch.randperm(S)
    shuffle = shuffle[experts[shuffle].argsort(stable=True)]
    assert (slots[shuffle] != slots).any()
    inputs, weights, biases, gates = linear_arguments(K, K, True)
    results = []
    for order in (slots, slots[shuffle]):
        groups = (experts, order, ends)
        rows = scattermoe.parallel_linear(
            inputs, weights, K, *groups, expert_biases=biases, grouped_out=True
        )
        out = scattermoe.parallel_linear(inputs, weights, K, *groups, biases, gates)
        results.append((rows, out))
    torch.testing.assert_close(results[1][0], results[0][0][shuffle])
    torch.testing.assert_close(results[1][1], results[0][1])


@pytest.mark.parametrize("gate_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype: torch.dtype, gate_dtype: torch.dtype | None) -> None:
    """Gates may have a dtype of their own, and are not rounded; inputs need not be contiguous."""
    ids = random_ids()
    groups = scattermoe.flatten_sort_count(ids, E)
    _, weights, biases, gates = linear_arguments(K, K, True, dtype)
    assert biases is not None and gates is not None
    inputs = torch.randn(D, T).to(dtype).t().requires_grad_()
    gates = gates.detach().to(gate_dtype or dtype).requires_grad_()
    values = (inputs, weights, biases, gates)
    out = scattermoe.parallel_linear(inputs, weights, K, *groups, biases, gates)
    slots = scattermoe.parallel_linear(inputs, weights, K, *groups, biases).detach()
    of_token = torch.arange(S).view(T, K).tolist()
    assert_same_bits(out.detach(), combine(slots, of_token, gates.detach()))
    wide = [value.detach().double().requires_grad_() for value in values]
    want = linear_loop(wide[0], wide[1], K, ids, wide[2], wide[3], False, False)
    grad = torch.randn(T, N).to(dtype)
    got = (out, *torch.autograd.grad(out, values, grad))
    exact = (want, *torch.autograd.grad(want, wide, grad.double()))
    for value, expected in zip(got, exact):
        loosest = max(TOLERANCE[dtype], TOLERANCE[value.dtype])
        torch.testing.assert_close(value.double(), expected, rtol=loosest, atol=4 * loosest)
    assert [value.dtype for value in got[1:]] == [value.dtype for value in values]


def test_autocast() -> None:
    groups = scattermoe.flatten_sort_count(random_ids(), E)
    inputs, weights, biases, gates = linear_arguments(K, K, True, torch.float32)
    assert biases is not None
    with torch.autocast("cpu", torch.bfloat16):
        out = scattermoe.parallel_linear(inputs, weights, K, *groups, biases, gates)
    half = (inputs.bfloat16(), weights.bfloat16(), K, *groups, biases.bfloat16())
    assert_same_bits(out.detach(), scattermoe.parallel_linear(*half, gates).detach())


@pytest.mark.parametrize("bias", [False, True])
def test_parallel_experts(bias: bool) -> None:
    torch.manual_seed(0)
    experts = scattermoe.ParallelExperts(50, 40, 30, bias=bias)
    assert experts.weight.shape == (50, 30, 40)
    assert abs(float(experts.weight.detach().std()) - 0.02) < 1e-3
    assert list(experts.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    if bias:
        assert experts.bias is not None and experts.bias.tolist() == [[0] * 30] * 50
    else:
        assert experts.bias is None
    assert "num_experts=50, input_size=40, output_size=30" in repr(experts)

    ids = random_ids()
    experts = scattermoe.ParallelExperts(E, D, N, bias).double()
    if experts.bias is not None:
        nn.init.normal_(experts.bias)
    groups = scattermoe.flatten_sort_count(ids, E)
    inputs, _, _, gates = linear_arguments(K, K, False)
    weights = experts.weight.transpose(1, 2)
    for fan, grouped_in, grouped_out in ((K, False, False), (None, False, True), (K, True, False)):
        k, x = (1, torch.randn(S, D).double()) if grouped_in else (K, inputs)
        g = None if fan is None else gates
        out = experts(x, k, *groups, gates=g, grouped_in=grouped_in, grouped_out=grouped_out)
        want = linear_loop(x, weights, k, ids, experts.bias, g, grouped_in, grouped_out)
        torch.testing.assert_close(out, want)
    assert torch.autograd.grad(out.sum(), experts.weight)[0].is_contiguous()


ACTIVATIONS: list[tuple[type[scattermoe.MLP], Callable[[Tensor], Tensor] | None]] = [
    (scattermoe.MLP, nn.GELU()),
    (scattermoe.MLP, torch.tanh),
    (scattermoe.MLP, None),
    (scattermoe.GLUMLP, None),
    (scattermoe.GLUMLP, nn.GELU()),
]


def mlp_loop(
    mlp: scattermoe.MLP,
    activation: Callable[[Tensor], Tensor] | None,
    x: Tensor,
    gates: Tensor,
    ids: Tensor,
) -> Tensor:
    first, second = mlp.experts, mlp.output_experts
    out = []
    for token, chosen in enumerate(ids.tolist()):
        total = torch.zeros_like(x[0])
        for k, e in enumerate(chosen):
            h = first.weight[e] @ x[token] + (0 if first.bias is None else first.bias[e])
            if isinstance(mlp, scattermoe.GLUMLP):
                up, gate = h.chunk(2)
                h = up * (activation or nn.functional.silu)(gate)
            elif activation is not None:
                h = activation(h)
            y = second.weight[e] @ h + (0 if second.bias is None else second.bias[e])
            total = total + gates[token, k] * y
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind, activation", ACTIVATIONS)
def test_mlp(
    kind: type[scattermoe.MLP], activation: Callable[[Tensor], Tensor] | None, bias: bool
) -> None:
    """Called as the peer's README does, with every gradient; leading dimensions are kept."""
    mlp = kind(
        input_size=D, hidden_size=5, activation=activation, num_experts=E, top_k=K, bias=bias
    ).double()
    shapes = {"experts.weight": [E, 5, D], "experts.bias": [E, 5]}
    if kind is scattermoe.GLUMLP:
        shapes = {name: [E, 10, *shape[2:]] for name, shape in shapes.items()}
    shapes |= {"output_experts.weight": [E, D, 5], "output_experts.bias": [E, D]}
    shapes = {name: shape for name, shape in shapes.items() if bias or "bias" not in name}
    assert {name: list(value.shape) for name, value in mlp.named_parameters()} == shapes
    assert f"k={K}" in repr(mlp)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)

    ids, x = random_ids(), torch.randn(T, D).double().requires_grad_()
    gates = torch.rand(T, K).double().requires_grad_()
    out, want = mlp(x, gates, ids), mlp_loop(mlp, activation, x, gates, ids)
    torch.testing.assert_close(out, want)
    values = [x, gates, *mlp.parameters()]
    grad = torch.randn(T, D).double()
    got = torch.autograd.grad(out, values, grad)
    for value, expected in zip(got, torch.autograd.grad(want, values, grad)):
        torch.testing.assert_close(value, expected)
    assert_same_bits(mlp(x[:, None], gates, ids).detach(), out.detach()[:, None])
    batch = mlp(x[None], gates[None], ids[None])
    assert_same_bits(batch.detach(), out.detach()[None])


def test_mlp_with_one_choice() -> None:
    """`top_k` is at most E; gates and ids may then have one dimension."""
    mlp = scattermoe.MLP(D, 5, 1, 3)
    assert mlp.top_k == 1
    x, gates = torch.randn(T, D), torch.rand(T)
    out = mlp(x, gates, torch.zeros(T, dtype=torch.int64))
    want = gates[:, None] * (x @ mlp.experts.weight[0].t() @ mlp.output_experts.weight[0].t())
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("kind", [scattermoe.MLP, scattermoe.GLUMLP])
def test_mlp_without_tokens(kind: type[scattermoe.MLP]) -> None:
    mlp = kind(D, 5, E, K, bias=True)
    x, gates = torch.zeros(0, D, requires_grad=True), torch.zeros(0, K, requires_grad=True)
    out = mlp(x, gates, torch.zeros(0, K, dtype=torch.int64))
    assert out.shape == (0, D)
    out.sum().backward()
    for value in (x, gates, *mlp.parameters()):
        assert value.grad is not None and (value.grad == 0).all()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("kind", [scattermoe.MLP, scattermoe.GLUMLP])
def test_mlp_with_nothing_routed(kind: type[scattermoe.MLP]) -> None:
    """Zeros with a graph, so that every rank of a job runs its backward."""
    mlp = kind(D, 5, E, K, bias=True)
    x, gates = torch.randn(T, D, requires_grad=True), torch.full((T, K), math.nan)
    out = mlp(x, gates.requires_grad_(), torch.full((T, K), -1))
    assert out.shape == (T, D) and (out == 0).all()
    out.sum().backward()
    for value in (x, gates, *mlp.parameters()):
        assert value.grad is not None and (value.grad == 0).all()


def test_mlp_compiled() -> None:
    mlp = scattermoe.GLUMLP(D, 5, E, K, bias=True).double()
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (T, T + 3):
        ids = torch.randint(E, (num_tokens, K))
        x = torch.randn(num_tokens, D).double().requires_grad_()
        gates = torch.rand(num_tokens, K).double().requires_grad_()
        values = [x, gates, *mlp.parameters()]
        out, want = compiled(x, gates, ids), mlp(x, gates, ids)
        torch.testing.assert_close(out, want)
        grad = torch.randn_like(want)
        got = torch.autograd.grad(out, values, grad)
        for value, expected in zip(got, torch.autograd.grad(want, values, grad)):
            torch.testing.assert_close(value, expected)


X, W, ROWS = torch.zeros(3, D), torch.zeros(2, D, N), torch.zeros(6, D)
GROUPS: dict[str, Any] = {
    "sorted_expert_idxs": torch.tensor([0, 0, 0, 1, 1, 1]),
    "sorted_scattered_idxs": torch.arange(6),
    "expert_offsets": torch.tensor([3, 6]),
}
GATES = torch.zeros(3, 2)
ERRORS: list[tuple[str, dict[str, Any]]] = [
    (r"`inputs`: expected shape \[S/k, D\]", {"inputs": X[0]}),
    ("`inputs`: expected dtype", {"inputs": X.int()}),
    ("`inputs`: expected a tensor", {"inputs": X.tolist()}),
    ("`k`: expected at least 1", {"k": 0}),
    ("`k`: expected 1 with grouped_in, got 2", {"grouped_in": True}),
    (r"`sorted_expert_idxs`: expected shape \[9\]", {"k": 3}),
    (r"`sorted_scattered_idxs`: expected shape \[6\]", {"sorted_scattered_idxs": torch.arange(5)}),
    ("`sorted_scattered_idxs`: expected dtype", {"sorted_scattered_idxs": torch.zeros(6)}),
    (r"`expert_weights`: expected shape \[E, 3, N\]", {"expert_weights": W.mT}),
    ("`expert_weights`: expected torch.float32", {"expert_weights": W.half()}),
    (r"`expert_offsets`: expected shape \[2\]", {"expert_offsets": torch.tensor([0, 3, 6])}),
    ("`expert_offsets`: expected dtype", {"expert_offsets": torch.zeros(2)}),
    ("end at 6 at most", {"expert_offsets": torch.tensor([3, 7])}),
    (r"`expert_biases`: expected shape \[2, 2\]", {"expert_biases": torch.zeros(2)}),
    ("`expert_biases`: expected torch.float32", {"expert_biases": torch.zeros(2, N).half()}),
    (r"`gates`: expected shape \[G, F\]", {"gates": torch.zeros(6)}),
    ("`gates`: expected one entry for each of 6 slots", {"gates": GATES[:2]}),
    ("`gates`: expected dtype", {"gates": GATES.int()}),
    ("`grouped_out`: expected False with gates", {"gates": GATES, "grouped_out": True}),
]


@pytest.mark.parametrize("message, changed", ERRORS)
def test_errors(message: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"inputs": X, "expert_weights": W, "k": 2, **GROUPS}
    scattermoe.parallel_linear(**arguments)
    with pytest.raises(ArgumentError, match=message):
        scattermoe.parallel_linear(**(arguments | changed))


def test_errors_of_the_ids_and_of_the_modules() -> None:
    ids = torch.tensor([[0, 2]])
    with pytest.raises(ArgumentError, match="expected ids from -1 to 1, got ids from 0 to 2"):
        scattermoe.flatten_sort_count(ids, 1)
    with pytest.raises(ArgumentError, match="`expert_idxs`: expected dtype"):
        scattermoe.flatten_sort_count(ids.float(), 3)
    mlp = scattermoe.GLUMLP(D, 5, 3, 2)
    with pytest.raises(ArgumentError, match=r"GLUMLP: `expert_p`: expected shape \[1, 2\]"):
        mlp(X[:1], torch.zeros(1, 3), ids)
    with pytest.raises(ArgumentError, match="GLUMLP: `expert_p`: expected dtype"):
        mlp(X[:1], torch.zeros(1, 2).int(), ids)
    with pytest.raises(ArgumentError, match=r"GLUMLP: `expert_idxs`: expected shape \[1, 2\]"):
        mlp(X[:1], torch.zeros(1, 2), ids[:, :1])
