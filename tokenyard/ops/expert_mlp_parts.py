"""The arguments of `expert_mlp`, named and put together."""

from typing import Literal, NamedTuple

from torch import Tensor

WeightsOn = Literal["output", "input", "later"]
WEIGHTS_ON = ("output", "input", "later")


class LoRA(NamedTuple):
    """A low-rank addition to one matrix of every expert (Hu et al., 2021): scale * b[e] a[e].

    a [E,r,size_in], b [E,size_out,r], in this order whatever the layout of the weight; dtype of the weight.
    size_out counts as the weight's rows do: gate and up concatenated, or interleaved.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


class Projection(NamedTuple):
    """weight[e] row + bias[e] + scale * b[e] (a[e] row), for the rows of expert e.

    The products with weight and b, and the sum, are each rounded to the dtype of the rows, as is a[e] row.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scale: float
    layout: str


class Inputs(NamedTuple):
    """What `expert_mlp` is differentiable in."""

    x: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    b_gate_up: Tensor | None
    b_down: Tensor | None
    lora_a_gate_up: Tensor | None
    lora_b_gate_up: Tensor | None
    lora_a_down: Tensor | None
    lora_b_down: Tensor | None


NUM_INPUTS = len(Inputs._fields)


class Maps(NamedTuple):
    """A routing's tensors."""

    topk_indices: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    expert_offsets: Tensor
    tokens_per_expert: Tensor

    @property
    def groups(self) -> tuple[Tensor, Tensor]:
        return self.expert_offsets, self.tokens_per_expert

    @property
    def top_k(self) -> int:
        return self.row_of_slot.shape[1]

    @property
    def num_rows(self) -> int:
        return self.slot_of_row.shape[0]


class Form(NamedTuple):
    """Which MLP it is."""

    activation: str
    gate_up_layout: str
    weight_layout: str
    weights_on: str
    scale_gate_up: float
    scale_down: float

    def gate_up(self, inputs: Inputs) -> Projection:
        return Projection(
            inputs.w_gate_up,
            inputs.b_gate_up,
            inputs.lora_a_gate_up,
            inputs.lora_b_gate_up,
            self.scale_gate_up,
            self.weight_layout,
        )

    def down(self, inputs: Inputs) -> Projection:
        return Projection(
            inputs.w_down,
            inputs.b_down,
            inputs.lora_a_down,
            inputs.lora_b_down,
            self.scale_down,
            self.weight_layout,
        )


class Encoded(NamedTuple):
    """A reduction, as `encode_reduction` returns it."""

    order: str
    ep_size: int
    within_rank: str
    across_ranks: str


PLAIN_SUM = Encoded("slot", 0, "fp32", "fp32")
