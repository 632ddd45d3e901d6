"""Drop-in for `scattermoe` and `scattermoe.mlp`: the linear map per expert, and MLPs of it.

T tokens, E experts, k experts per token, S = T*k slots; slot t*k + j is the j-th choice of token t.

sorted_expert_idxs     [S] the expert of each row, ascending; dtype of the ids
sorted_scattered_idxs  [S] int64, the slot of each row
expert_offsets         [E] int64, the row after each expert's last

"Grouped" tensors are in the order of the rows, others in the order of tokens or slots.

As the peer, but defined where it is not:
- rows of one expert are in slot order, always. Peer: sorts unstably
- CPU tensors, fp64, any strides; gates of any float dtype. Peer: gates of the dtype of the inputs
- the sum with gates is in fp32 (fp64 for fp64 inputs), in slot order, and rounded once; so is the gradient of
  the inputs
- fp32 products follow `torch.backends.cuda.matmul.allow_tf32`. Peer: TF32 unless its own switch is off
- an id of -1 or E has no row: it comes last, as -1, adds nothing, and its gate has gradient zero. Peer:
  fails on -1, and reads a bias out of bounds for E
- no tokens, nothing routed and empty experts give results of the documented shapes, with gradients
Nothing waits for a GPU, but GEMMs without a kernel (fp64, or no Triton). The grouped inputs are kept for the
gradient, k times the tokens that the peer keeps; `tokenyard.expert_mlp` keeps less than either. The peer's
`kernels` and `utils` are not here.

>>> import torch
>>> ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
>>> groups = flatten_sort_count(ids, num_experts=3)
>>> [group.tolist() for group in groups]
[[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [1, 3, 6, 0, 5, 7, 8, 2, 4, 9], [3, 7, 10]]
>>> x, weights = torch.arange(5.0)[:, None], torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
>>> parallel_linear(x, weights, 2, *groups, gates=torch.full((5, 2), 0.5)).flatten().tolist()
[0.0, 50.5, 110.0, 16.5, 220.0]
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tokenyard import check, conventions
from tokenyard.ops.grouped_gemm import WeightLayout, grouped_gemm
from tokenyard.ops.permute import permute
from tokenyard.ops.rows import autocast_dtype
from tokenyard.ops.unpermute import unpermute
from tokenyard.routing import route

__all__ = ["GLUMLP", "MLP", "ParallelExperts", "flatten_sort_count", "parallel_linear"]


def flatten_sort_count(expert_idxs: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sorted_expert_idxs [S], sorted_scattered_idxs [S] int64, expert_offsets [E] int64).

    expert_idxs  [T,k] or any other shape, S ids of any integer dtype; -1 and E mean no expert
    num_experts  E

    Stable. Ids on the CPU are checked; those on a GPU are not, and mean no expert outside 0 .. E-1.
    """
    name = "compat.scattermoe.flatten_sort_count"
    check.tensor(name, "expert_idxs", expert_idxs, dtypes=check.INTEGER_DTYPES)
    routing = route(expert_idxs.flatten()[:, None], num_experts)
    experts = routing.expert_of_row.to(expert_idxs.dtype)
    ends = conventions.to_group_ends(routing).long()
    return experts, conventions.to_sorted_slots(routing), ends


def parallel_linear(
    inputs: Tensor,
    expert_weights: Tensor,
    k: int,
    sorted_expert_idxs: Tensor,
    sorted_scattered_idxs: Tensor,
    expert_offsets: Tensor,
    expert_biases: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:
    """Multiply the rows of each expert by its matrix: inputs [S/k,D] -> [S,N], or [G,N] with gates.

    inputs          [S/k,D] fp16, bf16, fp32 or fp64: each is the input of k consecutive slots
    expert_weights  [E,D,N], dtype and device of inputs; any strides, so a permuted [E,N,D] is not copied
    k               slots per input: that of the tokens, or 1 for inputs of their own; 1 with grouped_in
    sorted_expert_idxs, sorted_scattered_idxs, expert_offsets   from `flatten_sort_count`; the experts are
                    taken from the offsets, the first is not read
    expert_biases   [E,N] or None
    gates           [G,F] with G*F = S: the slots g*F + f are added up, weighted; None: no sum
    grouped_in      whether inputs are in the order of the rows
    grouped_out     whether the result is; not with gates

    Rows past the last end give zero. Under autocast the product has its dtype.
    Differentiable in inputs, expert_weights, expert_biases and gates.
    Peer: with gates and grouped_out it weighs rows by the gates of other slots.
    """
    name = "compat.scattermoe.parallel_linear"
    check.tensor(name, "inputs", inputs, ["S/k", "D"], dtypes=check.FLOAT_DTYPES)
    integers, device = check.INTEGER_DTYPES, inputs.device
    check.at_least(name, "k", k, 1)
    if grouped_in and k != 1:
        check.fail(name, "k", "1 with grouped_in", k)
    num_slots = inputs.shape[0] * k
    for argument, value in (
        ("sorted_expert_idxs", sorted_expert_idxs),
        ("sorted_scattered_idxs", sorted_scattered_idxs),
    ):
        check.tensor(name, argument, value, [num_slots], dtypes=integers, device=device)
    check.tensor(name, "expert_weights", expert_weights, ["E", inputs.shape[1], "N"], device=device)
    num_experts, _, size = expert_weights.shape
    check.tensor(
        name, "expert_offsets", expert_offsets, [num_experts], dtypes=integers, device=device
    )
    if expert_biases is not None:
        shape = [num_experts, size]
        check.tensor(name, "expert_biases", expert_biases, shape, device=device)
    if autocast_dtype(inputs) is None:
        check.same_dtype(name, "expert_weights", expert_weights, "inputs", inputs.dtype)
        if expert_biases is not None:
            check.same_dtype(name, "expert_biases", expert_biases, "inputs", inputs.dtype)
    fan_in = 1
    if gates is not None:
        check.tensor(name, "gates", gates, ["G", "F"], dtypes=check.FLOAT_DTYPES, device=device)
        fan_in = gates.shape[1]
        if fan_in < 1 or gates.numel() != num_slots:
            expected = f"one entry for each of {num_slots} slots"
            check.fail(name, "gates", expected, check.describe(gates))
        if grouped_out:
            check.fail(name, "grouped_out", "False with gates, which add up slots", grouped_out)

    offsets = conventions.from_group_ends(expert_offsets)
    slots, rows = sorted_scattered_idxs, inputs
    if not grouped_in:
        routing = conventions.from_sorted_slots(slots, offsets, k, inputs.shape[0])
        rows = permute(inputs, routing)
    layout: WeightLayout = "EKN"
    if expert_weights.mT.is_contiguous():  # so that its gradient is, too
        layout, expert_weights = "ENK", expert_weights.mT
    rows = grouped_gemm(rows, expert_weights, offsets, layout=layout, bias=expert_biases)
    if grouped_out:
        return rows
    routing = conventions.from_sorted_slots(slots, offsets, fan_in, num_slots // fan_in)
    return unpermute(rows, routing, gates)


class ParallelExperts(nn.Module):
    """`parallel_linear` with its parameters: weight [E,N,D], and with `bias` bias [E,N].

    Initialised as the peer: weights from a normal distribution of standard deviation 0.02, biases zero.
    """

    def __init__(
        self, num_experts: int, input_size: int, output_size: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.output_size = num_experts, input_size, output_size
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))
        self.bias = nn.Parameter(torch.empty(num_experts, output_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        inputs: Tensor,
        k: int,
        sorted_expert_idxs: Tensor,
        sorted_scattered_idxs: Tensor,
        expert_offsets: Tensor,
        gates: Tensor | None = None,
        grouped_in: bool = False,
        grouped_out: bool = False,
    ) -> Tensor:
        """inputs [S/k,D] -> [S,N], or [G,N] with gates [G,F]; arguments as for `parallel_linear`."""
        return parallel_linear(
            inputs,
            self.weight.mT,
            k,
            sorted_expert_idxs,
            sorted_scattered_idxs,
            expert_offsets,
            expert_biases=self.bias,
            gates=gates,
            grouped_in=grouped_in,
            grouped_out=grouped_out,
        )

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, input_size={self.input_size}, "
            f"output_size={self.output_size}"
        )


class MLP(nn.Module):
    """Two linear maps per expert with an activation between them.

    Parameters: experts.weight [E,I,D], output_experts.weight [E,D,I]; with `bias` experts.bias [E,I] and
    output_experts.bias [E,D]. `activation` is any callable on [S,I]; None means none (peer: fails).
    """

    _parts = 1  # of the first map's result

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.hidden_size = num_experts, input_size, hidden_size
        self.experts = ParallelExperts(num_experts, input_size, self._parts * hidden_size, bias)
        self.output_experts = ParallelExperts(num_experts, hidden_size, input_size, bias)
        self.top_k = min(top_k, num_experts)
        self.activation = activation

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        """x [...,D] -> [...,D], for T tokens; expert_p, the gates, and expert_idxs, the ids: [T,k]."""
        tokens = x.reshape(-1, x.shape[-1])
        shape = [tokens.shape[0], self.top_k]
        for argument, value, dtypes in (
            ("expert_p", expert_p, check.FLOAT_DTYPES),
            ("expert_idxs", expert_idxs, check.INTEGER_DTYPES),
        ):
            name = f"compat.scattermoe.{type(self).__name__}"
            check.tensor(name, argument, value, dtypes=dtypes, device=x.device)
            if value.numel() != shape[0] * shape[1]:
                check.fail(name, argument, f"shape {shape}", check.describe(value))
        groups = flatten_sort_count(expert_idxs, self.num_experts)
        h = self._activate(self.experts(tokens, self.top_k, *groups, grouped_out=True))
        y: Tensor = self.output_experts(
            h, 1, *groups, gates=expert_p.reshape(shape), grouped_in=True
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    def _activate(self, h: Tensor) -> Tensor:
        return h if self.activation is None else self.activation(h)

    def extra_repr(self) -> str:
        return f"k={self.top_k}"


class GLUMLP(MLP):
    """`MLP` with a gate: up * activation(gate), both from experts.weight [E,2I,D], up first.

    `tokenyard.expert_mlp` has the gate first. `activation` is any callable on [S,I]; None means SiLU.
    """

    _parts = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        activation = nn.SiLU() if activation is None else activation
        super().__init__(input_size, hidden_size, num_experts, top_k, bias, activation)

    def _activate(self, h: Tensor) -> Tensor:
        up, gate = h.chunk(2, dim=-1)
        return super()._activate(gate) * up
