"""Routings, shapes, exact arithmetic and a table of operator calls, shared by the tests.

Expectations are written here in plain loops: `Case` builds its maps without the package.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ldexp
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import tokenyard
from tokenyard import Routing

# (T, H, E, K): one row, K = E, K = 22, expert counts of real models that are no power of two
SHAPES = [
    (1, 1, 1, 1),
    (5, 8, 3, 1),
    (6, 20, 6, 6),
    (4, 33, 60, 22),
    (9, 8, 72, 8),
    (3, 20, 160, 6),
    (2, 8, 384, 8),
]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MOVED = [*FLOATS, torch.bool, torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn]


@dataclass(frozen=True)
class Case:
    """A routing as plain Python values, with the maps that it must lead to."""

    topk_indices: tuple[tuple[int, ...], ...]
    top_k: int
    num_experts: int
    row_alignment: int = 1
    num_rows: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.topk_indices)

    def route(self) -> Routing:
        indices = torch.tensor(self.topk_indices, dtype=torch.int64)
        return tokenyard.route(
            indices.reshape(self.num_tokens, self.top_k),
            self.num_experts,
            row_alignment=self.row_alignment,
            num_rows=self.num_rows,
        )

    def slot_of_row(self) -> list[int]:
        """The slot of every row, -1 for padding."""
        experts = [expert for choices in self.topk_indices for expert in choices]
        slots: list[int] = []
        for expert in range(self.num_experts):
            slots += [slot for slot, chosen in enumerate(experts) if chosen == expert]
            slots += [-1] * (-len(slots) % self.row_alignment)
        num_rows = self.num_rows
        if num_rows is None:
            num_rows = len(experts) + min(self.num_experts, len(experts)) * (self.row_alignment - 1)
            num_rows -= num_rows % self.row_alignment
        return [*slots, *[-1] * num_rows][:num_rows]

    def rows_of_token(self) -> list[list[tuple[int, int, int]]]:
        """(k, row, expert) of every routed slot of each token, k ascending."""
        row_of_slot = {slot: row for row, slot in enumerate(self.slot_of_row()) if slot >= 0}
        return [
            [
                (k, row_of_slot[token * self.top_k + k], expert)
                for k, expert in enumerate(choices)
                if token * self.top_k + k in row_of_slot
            ]
            for token, choices in enumerate(self.topk_indices)
        ]

    def expert_of_row(self) -> list[int]:
        """The expert of every row that holds a token, -1 for padding."""
        experts = [expert for choices in self.topk_indices for expert in choices]
        return [-1 if slot < 0 else experts[slot] for slot in self.slot_of_row()]

    def padding(self) -> list[int]:
        return [row for row, slot in enumerate(self.slot_of_row()) if slot < 0]


SPECIAL = {
    "no tokens": Case((), 2, 3),
    "no tokens, rows": Case((), 2, 3, num_rows=4),
    "nothing routed": Case(((-1, -1), (4, -1), (4, 4)), 2, 4),
    "no rows": Case(((0, 1), (1, 0)), 2, 2, num_rows=0),
    "first expert empty": Case(((1, 2), (2, 1), (1, -1)), 2, 3),
    "last expert empty": Case(((1, 0), (0, 1), (3, 0)), 2, 3),
    "all but one empty": Case(((2, -1), (5, 2), (2, 2)), 2, 5),
    "one takes all": Case(((1,), (1,), (1,), (1,)), 1, 3),
    "duplicates": Case(((0, 0, 1), (1, 1, 1), (0, 1, 0)), 3, 2),
    "aligned": Case(((3, 0), (2, 0), (2, 3), (-1, 4)), 2, 4, row_alignment=4),
    "rows too few": Case(((1, 0), (2, 0), (2, 1)), 2, 3, num_rows=4),
    "rows too many": Case(((1, 0), (2, 0), (2, -1)), 2, 3, row_alignment=2, num_rows=16),
    "one expert": Case(((0,), (-1,), (1,)), 1, 1),
}


@st.composite
def routings(draw: Callable[..., Any], max_tokens: int = 6) -> Case:
    """Empty experts, drops of both kinds, duplicates, alignment, too few and too many rows."""
    num_experts = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    top_k = draw(st.integers(1, 4))
    ids = st.sampled_from(range(-1, num_experts + 1))
    allowed = draw(st.lists(ids, min_size=1, max_size=5, unique=True))
    token = st.lists(st.sampled_from(allowed), min_size=top_k, max_size=top_k).map(tuple)
    indices = tuple(draw(st.lists(token, max_size=max_tokens)))
    row_alignment = draw(st.sampled_from([1, 2, 4, 16]))
    num_rows = draw(st.none() | st.integers(0, 12).map(lambda rows: rows * row_alignment))
    return Case(indices, top_k, num_experts, row_alignment, num_rows)


def random_case(num_tokens: int, num_experts: int, top_k: int, row_alignment: int = 1) -> Case:
    """Distinct experts per token, one slot in eight dropped."""

    def choose() -> tuple[int, ...]:
        chosen = random.sample(range(num_experts), top_k)
        return tuple(-1 if random.random() < 0.125 else expert for expert in chosen)

    return Case(tuple(choose() for _ in range(num_tokens)), top_k, num_experts, row_alignment)


def wide(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values times 2^-6 to 2^6: two orders of a sum seldom agree."""
    return (torch.randn(shape).double() * 2.0 ** torch.randint(-6, 7, shape)).to(dtype)


def integers(*shape: int, dtype: torch.dtype, bound: int = 4) -> Tensor:
    """Small integers, whose fp32 sums and products are exact in any order."""
    return torch.randint(-bound, bound + 1, shape).to(dtype)


def accumulator(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype == torch.float64 else np.float32


def rounded(value: float, dtype: torch.dtype) -> float:
    """A value of the accumulator's type to the nearest of `dtype`, ties to even."""
    if dtype == torch.bfloat16:
        bits = int(np.float32(value).view(np.uint32))
        if bits & 0x7FFFFFFF > 0x7F800000:
            return float("nan")
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    numpy_types = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
    with np.errstate(over="ignore"):
        return float(numpy_types[dtype](value))


def nearest_fp32(value: Fraction) -> float:
    """An exact rational number to the nearest fp32, ties to even, with gradual underflow."""
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    quantum = max(exponent, -126) - 23
    result = ldexp(round(value / Fraction(2) ** quantum), quantum)
    return result if abs(result) < 2.0**128 else float("inf") * (1 if value > 0 else -1)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # first, for its message
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.contiguous().view(view), want.contiguous().view(view))


@dataclass(frozen=True)
class Call:
    """An operator, its definition, and the shapes of its differentiable arguments."""

    operator: str
    shapes: Callable[[Routing], list[tuple[int, ...]]]
    arguments: Callable[..., dict[str, Any]]

    def __call__(self, routing: Routing, *inputs: Tensor) -> Tensor:
        return getattr(tokenyard, self.operator)(**self.arguments(routing, *inputs))

    def reference(self, routing: Routing, *inputs: Tensor) -> Tensor:
        function = getattr(tokenyard, f"{self.operator}_reference")
        return function(**self.arguments(routing, *inputs))

    def inputs(self, routing: Routing, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [torch.randn(s, dtype=dtype).requires_grad_() for s in self.shapes(routing)]


def _named(*names: str, **fixed: Any) -> Callable[..., dict[str, Any]]:
    return lambda routing, *inputs: {"routing": routing, **dict(zip(names, inputs)), **fixed}


def _grouped(routing: Routing, *inputs: Tensor) -> dict[str, Any]:
    return dict(zip(("rows", "weight", "bias"), inputs)) | {"groups": routing, "layout": "ENK"}


def _chunks(routing: Routing, x: Tensor) -> dict[str, Any]:
    order = torch.tensor([2, 0, 1])
    return {"x": x, "split_sizes": routing.tokens_per_expert, "order": order}


def _tokens(routing: Routing, *inputs: Tensor) -> dict[str, Any]:
    return dict(zip(("x", "weight", "bias"), inputs))


E, K, H, N = 3, 2, 4, 6  # N = 2I
_MLP = ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")


def _mlp_shapes(routing: Routing, biases: bool) -> list[tuple[int, ...]]:
    shapes = [(routing.num_tokens, H), (routing.num_tokens, K), (E, N, H), (E, H, N // 2)]
    return [*shapes, (E, N), (E, H)] if biases else [*shapes]


CALLS = {
    "router_logits": Call("router_logits", lambda r: [(r.num_tokens, H), (E, H)], _tokens),
    "router_logits, bias": Call(
        "router_logits", lambda r: [(r.num_tokens, H), (E, H), (E,)], _tokens
    ),
    "permute": Call("permute", lambda r: [(r.num_tokens, H)], _named("x")),
    "permute_slots": Call("permute_slots", lambda r: [(r.num_tokens, K)], _named("values")),
    "unpermute": Call("unpermute", lambda r: [(r.num_rows, H)], _named("rows")),
    "unpermute, weights": Call(
        "unpermute",
        lambda r: [(r.num_rows, H), (r.num_tokens, K)],
        _named("rows", "topk_weights", reduction=tokenyard.RankTree(3)),
    ),
    "sort_chunks": Call("sort_chunks", lambda r: [(r.num_rows, H)], _chunks),
    "grouped_gemm": Call("grouped_gemm", lambda r: [(r.num_rows, H), (E, N, H)], _grouped),
    "grouped_gemm, bias": Call(
        "grouped_gemm", lambda r: [(r.num_rows, H), (E, N, H), (E, N)], _grouped
    ),
    "expert_mlp": Call("expert_mlp", partial(_mlp_shapes, biases=False), _named(*_MLP)),
    "expert_mlp, biases": Call("expert_mlp", partial(_mlp_shapes, biases=True), _named(*_MLP)),
}
