"""Every peer's map: the worked example, exact conversions, round trips, junk, and the traps."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tokenyard
from tokenyard import Routing, conventions
from tokenyard.check import INTEGER_DTYPES, ArgumentError

FIELDS = [
    "topk_indices",
    "row_of_slot",
    "slot_of_row",
    "expert_offsets",
    "tokens_per_expert",
    "num_dropped",
]

# T=5, E=3, K=2
EXAMPLE = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
A = [1, 3, 6, 0, 5, 7, 8, 2, 4, 9]
B = [3, 7, 8, 2, 6, 0, 1, 4, 5, 9]
C = [3, 0, 7, 1, 8, 4, 2, 5, 6, 9]
E = [
    [3, 0, None, 1, 0, None, 2],
    [7, 1, None, 2, 0, None, 2],
    [8, 4, None, 2, 1, None, 2],
    [5, 2, None, 1, 0, None, 2],
    [9, 6, None, 2, 1, None, 2],
]
F = [0, 1, 3, 0, 2, 3, 4, 1, 2, 4]
G = [
    [[0, 3], [1, 7], [4, 8], [2, 5], [6, 9]],
    [[0, 1], [0, 2], [1, 2], [0, 1], [1, 2]],
]
OFFSETS = torch.tensor([0, 3, 7, 10])


def assert_same(got: Routing, expected: Routing) -> None:
    got.validate()
    for name in FIELDS:
        assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
    assert (got.num_experts, got.row_alignment) == (expected.num_experts, expected.row_alignment)
    assert (got.num_tokens, got.top_k) == (expected.num_tokens, expected.top_k)


def layout(routing: Routing) -> dict[str, Any]:
    return {
        "num_rows": routing.num_rows,
        "row_alignment": routing.row_alignment,
        "num_dropped": routing.num_dropped,
    }


def by_expert(routing: Routing) -> Routing:
    """The same rows, with the slots of each token in ascending expert id and -1 at the end."""
    ids = [
        sorted(expert for expert in choices if expert >= 0)
        for choices in routing.topk_indices.tolist()
    ]
    ids = [choices + [-1] * (routing.top_k - len(choices)) for choices in ids]
    again = tokenyard.route(
        torch.tensor(ids, dtype=torch.int64).view(routing.num_tokens, routing.top_k),
        routing.num_experts,
        row_alignment=routing.row_alignment,
        num_rows=routing.num_rows,
    )
    return replace(again, num_dropped=routing.num_dropped)


@st.composite
def drawn_routings(draw: Callable[..., Any], distinct: bool = False) -> Routing:
    """Sentinels, drops by num_rows, alignment, and unless `distinct` duplicates within a token."""
    num_experts, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    num_tokens = draw(st.integers(0, 40))
    drawn = draw(st.binary(min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    ids = [byte % (num_experts + 2) - 1 for byte in drawn]
    if distinct:
        for slot, expert in enumerate(ids):
            if expert in ids[slot - slot % top_k : slot]:
                ids[slot] = -1
    row_alignment = draw(st.sampled_from([1, 1, 2, 4]))
    num_rows = draw(st.none() | st.integers(0, 30).map(lambda blocks: blocks * row_alignment))
    return tokenyard.route(
        torch.tensor(ids, dtype=torch.int64).view(num_tokens, top_k),
        num_experts,
        row_alignment=row_alignment,
        num_rows=num_rows,
    )


@pytest.fixture
def example() -> Routing:
    return tokenyard.route(EXAMPLE, 3)


def test_example_to(example: Routing) -> None:
    def holds(got: Tensor, expected: list[Any], dtype: torch.dtype) -> None:
        assert got.tolist() == expected
        assert got.dtype == dtype

    holds(conventions.to_sorted_slots(example), A, torch.int64)
    holds(conventions.to_row_id_map(example), B, torch.int32)
    holds(conventions.to_scatter_indices(example), C, torch.int32)
    row_id_map, offsets = conventions.to_moe_ops_map(example)
    holds(row_id_map, B, torch.int32)
    holds(offsets, [0, 3, 7, 10], torch.int32)
    undefined_as_none = [[-1 if cell is None else cell for cell in token] for token in E]
    holds(conventions.to_mask_map(example), undefined_as_none, torch.int32)
    holds(conventions.to_sorted_tokens(example), F, torch.int64)
    holds(conventions.to_inverse_map(example), G, torch.int64)
    mask = [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]]
    holds(conventions.to_routing_map(example).int(), mask, torch.int32)
    assert conventions.to_routing_map(example).dtype == torch.bool
    holds(conventions.to_group_ends(example), [3, 7, 10], torch.int32)
    holds(conventions.to_group_counts(example), [3, 4, 3], torch.int64)
    for ends in conventions.to_padded_bins(example):
        holds(ends, [3, 7, 10], torch.int32)
    holds(conventions.to_expert_of_row(example), [0] * 3 + [1] * 4 + [2] * 3, torch.int32)


@pytest.mark.parametrize("dtype", sorted(INTEGER_DTYPES, key=str), ids=str)
def test_example_from(example: Routing, dtype: torch.dtype) -> None:
    def tensor(values: list[Any]) -> Tensor:
        strided = torch.tensor(values, dtype=dtype)
        return torch.stack([strided, strided], dim=-1)[..., 0]

    offsets = tensor([0, 3, 7, 10])
    assert_same(conventions.from_sorted_slots(tensor(A), offsets, 2), example)
    assert_same(conventions.from_row_id_map(tensor(B), offsets, 2), example)
    assert_same(conventions.from_scatter_indices(tensor(C), offsets, 2), example)
    routing, their_row_of_row = conventions.from_moe_ops_map(tensor(B), offsets, 2)
    assert_same(routing, example)
    assert their_row_of_row.tolist() == list(range(10))
    ascending = by_expert(example)
    junk = tensor([[77 if cell is None else cell for cell in token] for token in E])
    assert_same(conventions.from_mask_map(junk, offsets, top_k=2), ascending)
    assert_same(conventions.from_mask_map(junk, top_k=2), ascending)
    assert_same(conventions.from_sorted_tokens(tensor(F), offsets, 5, 2), ascending)
    assert_same(conventions.from_inverse_map(tensor(G), offsets), ascending)
    mask = tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
    assert_same(conventions.from_routing_map(mask, top_k=2), ascending)
    assert_same(conventions.from_routing_map(mask.bool().t().contiguous().t(), top_k=2), ascending)
    for got in (
        conventions.from_group_ends(tensor([3, 7, 10])),
        conventions.from_group_counts(tensor([3, 4, 3])),
        conventions.from_padded_bins(tensor([3, 7, 10]), tensor([3, 7, 10]))[0],
        conventions.from_expert_of_row(tensor([0] * 3 + [1] * 4 + [2] * 3), 3)[0],
    ):
        assert got.tolist() == [0, 3, 7, 10]
        assert got.dtype == torch.int32


@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**16))
def test_exact_conversions(num_tokens: int, num_experts: int, top_k: int, seed: int) -> None:
    """No drop, distinct experts per token: the formulas between the maps."""
    top_k = min(top_k, num_experts)
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    routing = tokenyard.route(scores.argsort(1)[:, :top_k], num_experts)
    a, b = conventions.to_sorted_slots(routing), conventions.to_row_id_map(routing)
    c, f = conventions.to_scatter_indices(routing), conventions.to_sorted_tokens(routing)
    rows, _ = conventions.to_inverse_map(routing)
    assert torch.equal(b.long(), a.argsort().view(num_tokens, top_k).t().reshape(-1))
    assert torch.equal(c.long(), a.argsort())
    assert torch.equal(f, a // top_k)
    ascending = c.view(num_tokens, top_k).sort(dim=1).values
    assert torch.equal(rows, ascending.long())
    assert torch.equal(conventions.to_mask_map(routing)[:, :top_k], ascending.flip(1))
    assert torch.equal(a, routing.slot_of_row.long())
    assert torch.equal(c, routing.row_of_slot.flatten())
    assert torch.equal(b, routing.row_of_slot.t().flatten())


@pytest.mark.usefixtures("poisoned_memory")
@given(drawn_routings())
def test_round_trips_that_keep_slots(routing: Routing) -> None:
    offsets, top_k, rest = routing.expert_offsets, routing.top_k, layout(routing)
    a = conventions.to_sorted_slots(routing)
    by_slots = conventions.from_sorted_slots(a, offsets, top_k, routing.num_tokens, **rest)
    assert_same(by_slots, routing)
    b = conventions.to_row_id_map(routing)
    assert_same(conventions.from_row_id_map(b, offsets, top_k, **rest), routing)
    c = conventions.to_scatter_indices(routing)
    assert_same(conventions.from_scatter_indices(c, offsets, top_k, **rest), routing)
    d, d_offsets = conventions.to_moe_ops_map(routing)
    again, their_row_of_row = conventions.from_moe_ops_map(d, d_offsets, top_k, **rest)
    assert_same(again, routing)
    assert their_row_of_row.tolist() == list(range(routing.num_rows))


@pytest.mark.usefixtures("poisoned_memory")
@given(drawn_routings(), st.randoms(use_true_random=False))
def test_moe_ops_order_is_arbitrary(routing: Routing, generator: random.Random) -> None:
    """Rows of an expert shuffled, as atomics would: the record is stable, and finds the rows."""
    theirs = routing.row_of_slot.clone().flatten()
    for expert in range(routing.num_experts):
        slots = (routing.topk_indices.flatten() == expert).nonzero().flatten().tolist()
        rows = theirs[slots].tolist()
        generator.shuffle(rows)
        theirs[slots] = torch.tensor(rows, dtype=torch.int32)
    row_id_map = theirs.view(routing.num_tokens, routing.top_k).t().reshape(-1)
    again, their_row_of_row = conventions.from_moe_ops_map(
        row_id_map, routing.expert_offsets, routing.top_k, **layout(routing)
    )
    assert_same(again, routing)
    their_rows = torch.full((routing.num_rows,), -1)
    for slot, row in enumerate(theirs.tolist()):
        if row >= 0:
            their_rows[row] = slot
    assert torch.equal(their_rows[their_row_of_row], routing.slot_of_row.long())
    assert their_row_of_row.sort().values.tolist() == list(range(routing.num_rows))


@pytest.mark.usefixtures("poisoned_memory")
@given(drawn_routings())
def test_round_trips_that_keep_duplicates(routing: Routing) -> None:
    ascending, offsets, rest = by_expert(routing), routing.expert_offsets, layout(routing)
    f = conventions.to_sorted_tokens(routing)
    by_tokens = conventions.from_sorted_tokens(
        f, offsets, routing.num_tokens, routing.top_k, **rest
    )
    assert_same(by_tokens, ascending)
    g = conventions.to_inverse_map(routing)
    assert_same(conventions.from_inverse_map(g, offsets, **rest), ascending)


@pytest.mark.usefixtures("poisoned_memory")
@given(drawn_routings(distinct=True), st.sampled_from([-1, 10**6, -(10**6)]))
def test_round_trips_of_masks(routing: Routing, undefined: int) -> None:
    ascending, top_k, rest = by_expert(routing), routing.top_k, layout(routing)
    e = conventions.to_mask_map(routing)
    columns = torch.arange(routing.num_experts)
    unused = columns >= e[:, -1:]
    e[:, :-1] = e[:, :-1].masked_fill(torch.cat([unused, unused], dim=1), undefined)
    assert_same(conventions.from_mask_map(e, routing.expert_offsets, top_k, **rest), ascending)
    assert_same(conventions.from_mask_map(e, top_k=top_k, **rest), ascending)

    mask = conventions.to_routing_map(routing)
    again = conventions.from_routing_map(
        mask, top_k=top_k, row_alignment=routing.row_alignment, num_rows=routing.num_rows
    )
    assert_same(replace(again, num_dropped=routing.num_dropped), ascending)
    widest = conventions.from_routing_map(
        mask, row_alignment=routing.row_alignment, num_rows=routing.num_rows
    ).validate()
    assert widest.top_k == routing.num_experts
    assert torch.equal(widest.token_of_row, ascending.token_of_row)
    assert torch.equal(conventions.to_routing_map(widest), mask)


@given(drawn_routings(distinct=True), st.integers(0, 30))
def test_mask_map_lists_rows_past_the_buffer(routing: Routing, blocks: int) -> None:
    """The peers keep the rows that `num_out_tokens` cuts off in the map: they are dropped here."""
    ids = routing.topk_indices
    full = tokenyard.route(ids, routing.num_experts, row_alignment=routing.row_alignment)
    num_rows = blocks * routing.row_alignment
    cut = tokenyard.route(
        ids, routing.num_experts, row_alignment=routing.row_alignment, num_rows=num_rows
    )
    got = conventions.from_mask_map(
        conventions.to_mask_map(full),
        top_k=routing.top_k,
        num_rows=num_rows,
        row_alignment=routing.row_alignment,
    )
    assert_same(got, by_expert(cut))


@given(drawn_routings())
def test_metadata(routing: Routing) -> None:
    offsets, counts = routing.expert_offsets.tolist(), routing.tokens_per_expert.tolist()
    alignment = routing.row_alignment
    ends = conventions.to_group_ends(routing)
    assert conventions.from_group_ends(ends).tolist() == offsets
    valid = conventions.to_group_counts(routing, device="cpu")
    assert valid.tolist() == counts
    widths = conventions.to_group_counts(routing, padded=True)
    assert conventions.from_group_counts(widths, device="cpu").tolist() == offsets
    assert conventions.from_group_counts(valid, row_alignment=alignment).tolist() == offsets
    padded_bins, bins = conventions.to_padded_bins(routing)
    assert bins.tolist() == [sum(counts[: expert + 1]) for expert in range(len(counts))]
    results = conventions.from_padded_bins(padded_bins, bins)
    assert [result.tolist() for result in results] == [offsets, counts]
    results = conventions.from_expert_of_row(
        conventions.to_expert_of_row(routing), routing.num_experts, row_alignment=alignment
    )
    assert [result.tolist() for result in results] == [offsets, counts]


def test_ranges_of_fixed_size() -> None:
    """A peer that gives every expert the same number of rows: offsets that no alignment explains."""
    slots = torch.tensor([1, 3, -1, -1, -1, -1, -1, -1, 0, 2, 4, -1])
    routing = conventions.from_sorted_slots(slots, torch.tensor([0, 4, 8, 12]), 2, 3).validate()
    assert routing.tokens_per_expert.tolist() == [2, 0, 3]
    assert routing.topk_indices.tolist() == [[2, 0], [2, 0], [2, -1]]
    assert conventions.to_group_counts(routing, padded=True).tolist() == [4, 4, 4]


def assert_harmless(routing: Routing) -> None:
    """Whatever is in it, nothing that reads by this record leaves its buffers."""
    for values, end in (
        (routing.topk_indices, routing.num_experts),
        (routing.row_of_slot, routing.num_rows),
        (routing.slot_of_row, routing.num_tokens * routing.top_k),
    ):
        assert ((values >= -1) & (values < end)).all()
    assert ((routing.expert_offsets >= 0) & (routing.expert_offsets <= routing.num_rows)).all()
    assert (routing.tokens_per_expert >= 0).all()


@settings(max_examples=60)
@given(st.data())
def test_junk_never_leaves_the_buffers(data: st.DataObject) -> None:
    wild = st.sampled_from([-(2**63), -(2**32), -2, -1, 2**31, 2**32, 2**32 + 1, 2**63 - 1])

    def junk(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        values = data.draw(st.lists(st.integers(-1, 8) | wild, min_size=size, max_size=size))
        return torch.tensor(values, dtype=torch.int64).view(shape)

    num_tokens, top_k, num_experts = 3, 2, 4
    offsets, flat = junk(num_experts + 1), junk(num_tokens * top_k)
    num_rows = data.draw(st.integers(0, 9))
    assert_harmless(conventions.from_sorted_slots(flat, offsets, top_k, 2))
    assert_harmless(conventions.from_row_id_map(flat, offsets, top_k, num_rows=num_rows))
    assert_harmless(conventions.from_scatter_indices(flat, offsets, top_k, num_rows=num_rows))
    routing, their_row_of_row = conventions.from_moe_ops_map(
        flat, offsets, top_k, num_rows=num_rows
    )
    assert_harmless(routing)
    assert their_row_of_row.sort().values.tolist() == list(range(num_rows))
    assert_harmless(conventions.from_sorted_tokens(flat, offsets, 2, top_k))
    inverse_map = junk(2, num_tokens, top_k)
    assert_harmless(conventions.from_inverse_map(inverse_map, offsets, num_rows=num_rows))
    mask_map = junk(num_tokens, 2 * num_experts + 1)
    assert_harmless(conventions.from_mask_map(mask_map, num_rows=num_rows))
    assert_harmless(conventions.from_mask_map(mask_map, offsets, top_k, num_rows=num_rows))
    assert_harmless(conventions.from_routing_map(mask_map, top_k=top_k).validate())
    results = conventions.from_expert_of_row(flat, num_experts)
    assert ((results[0] >= 0) & (results[0] <= flat.numel())).all()


@pytest.mark.parametrize("wild", [-1, -2, 10, 2**31, 2**32 + 1, -(2**63), 2**63 - 1])
def test_an_entry_out_of_range_has_no_row(wild: int) -> None:
    """The last slot of expert 2, slot 9 in row 9, is named by no map."""
    ids = EXAMPLE.clone()
    ids[4, 1] = -1
    expected = tokenyard.route(ids, 3, num_rows=10)
    expected = replace(expected, expert_offsets=OFFSETS.int())

    def changed(values: list[Any], index: tuple[int, ...]) -> Tensor:
        tensor = torch.tensor(values)
        tensor[index] = wild
        return tensor

    assert_same(conventions.from_sorted_slots(changed(A, (9,)), OFFSETS, 2, 5), expected)
    assert_same(conventions.from_row_id_map(changed(B, (9,)), OFFSETS, 2), expected)
    assert_same(conventions.from_scatter_indices(changed(C, (9,)), OFFSETS, 2), expected)
    assert_same(conventions.from_moe_ops_map(changed(B, (9,)), OFFSETS, 2)[0], expected)
    ascending = by_expert(expected)
    ascending = replace(ascending, expert_offsets=OFFSETS.int())
    assert_same(conventions.from_sorted_tokens(changed(F, (9,)), OFFSETS, 5, 2), ascending)
    assert_same(conventions.from_inverse_map(changed(G, (0, 4, 1)), OFFSETS), ascending)
    assert_same(conventions.from_inverse_map(changed(G, (1, 4, 1)), OFFSETS), ascending)
    filled = [[0 if cell is None else cell for cell in token] for token in E]
    past = replace(ascending, num_dropped=torch.tensor(int(wild >= 10), dtype=torch.int32))
    assert_same(conventions.from_mask_map(changed(filled, (4, 0)), OFFSETS, 2), past)
    assert_same(conventions.from_mask_map(changed(filled, (4, 3)), OFFSETS, 2), ascending)


def test_rows_past_the_last_range_have_no_slot() -> None:
    tokens, offsets = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 2, 3])
    routing = conventions.from_sorted_tokens(tokens, offsets, 2, 2).validate()
    assert routing.row_of_slot.tolist() == [[0, -1], [1, 2]]
    slots = torch.tensor([0, 2, 3, 1])
    routing = conventions.from_sorted_slots(slots, offsets, 2).validate()
    assert routing.row_of_slot.tolist() == [[0, -1], [1, 2]]


def test_validate_rejects_a_malformed_map() -> None:
    for row_id_map, invariant in (
        ([3, 7, 8, 0, 6, 2, 1, 4, 5, 9], "increasing slot order"),
        ([3, 7, 8, 2, 6, -1, 1, 4, 5, 9], "padding is each range's tail"),
        ([3, 7, 8, 2, 6, 1, 1, 4, 5, 9], "slot_of_row"),
    ):
        routing = conventions.from_row_id_map(torch.tensor(row_id_map), OFFSETS, 2)
        with pytest.raises(ValueError, match=invariant):
            routing.validate()
    ends_for_offsets = conventions.from_row_id_map(torch.tensor(B), torch.tensor([3, 7, 10]), 2)
    with pytest.raises(ValueError, match=re.escape("expert_offsets[0] == 0")):
        ends_for_offsets.validate()
    assert ends_for_offsets.slot_of_row[:3].tolist() == [-1, -1, -1]


def test_trap_1_two_maps_of_one_name_are_inverse(example: Routing) -> None:
    a, b = conventions.to_sorted_slots(example), conventions.to_row_id_map(example)
    slot_of_entry = torch.arange(10).view(5, 2).t().flatten()
    assert torch.equal(a[b.long()], slot_of_entry)
    assert not torch.equal(a, b.long())
    x = torch.randn(5, 4)
    rows = x[a // 2]
    tokens = torch.arange(5).repeat(2)
    assert torch.equal(rows[b.long()], x[tokens])
    with pytest.raises(ValueError, match="invariant broken"):
        conventions.from_row_id_map(a, OFFSETS, 2).validate()
    with pytest.raises(ValueError, match="invariant broken"):
        conventions.from_sorted_slots(b, OFFSETS, 2).validate()


@pytest.mark.parametrize(("num_tokens", "top_k"), [(6, 1), (1, 4)])
def test_trap_2_one_choice_or_token_hides_the_layout(num_tokens: int, top_k: int) -> None:
    routing = tokenyard.route(torch.rand(num_tokens, 9).argsort(1)[:, :top_k], 9)
    b, c = conventions.to_row_id_map(routing), conventions.to_scatter_indices(routing)
    assert torch.equal(b, c)
    assert B != C


def test_trap_3_slot_order_is_forgotten(example: Routing) -> None:
    swapped = tokenyard.route(EXAMPLE.flip(1), 3)
    for to in (conventions.to_mask_map, conventions.to_inverse_map, conventions.to_sorted_tokens):
        assert torch.equal(to(example), to(swapped))
    for to in (conventions.to_sorted_slots, conventions.to_scatter_indices):
        assert not torch.equal(to(example), to(swapped))
    # weights [T,K] go through [T,E]
    weights = torch.rand(5, 2)
    dense = torch.zeros(5, 3).scatter(1, EXAMPLE, weights)
    again = conventions.from_inverse_map(conventions.to_inverse_map(example), OFFSETS)
    by_row = dense.gather(1, again.topk_indices.long()).flatten()[again.slot_of_row.long()]
    assert torch.equal(by_row, weights.flatten()[example.slot_of_row.long()])


def test_trap_4_undefined_cells_do_not_matter(example: Routing) -> None:
    for undefined in (-1, 0, 2**31 - 1, -(2**31)):
        mask_map = [[undefined if cell is None else cell for cell in token] for token in E]
        theirs = torch.tensor(mask_map, dtype=torch.int32)
        assert_same(conventions.from_mask_map(theirs, OFFSETS, 2), by_expert(example))
        if undefined != -1:
            assert not torch.equal(theirs, conventions.to_mask_map(example))


def test_trap_5_a_mask_collapses_duplicates() -> None:
    routing = tokenyard.route(torch.tensor([[1, 1, 0], [0, 0, 0]]), 2)
    assert routing.num_rows == 6
    assert conventions.to_mask_map(routing).tolist() == [[4, 0, 1, 0, 2], [1, -1, 0, -1, 1]]
    assert conventions.to_routing_map(routing).int().tolist() == [[1, 1], [1, 0]]
    assert conventions.from_routing_map(
        conventions.to_routing_map(routing)
    ).slot_of_row.tolist() == [
        0,
        2,
        1,
        -1,
    ]
    assert sorted(conventions.to_sorted_slots(routing).tolist()) == list(range(6))
    assert sorted(conventions.to_row_id_map(routing).tolist()) == list(range(6))
    assert conventions.to_sorted_tokens(routing).tolist() == [0, 1, 1, 1, 0, 0]
    assert conventions.to_inverse_map(routing)[0].tolist() == [[0, 4, 5], [1, 2, 3]]


@pytest.mark.parametrize("none", [-1, 3])
def test_trap_6_no_expert_has_no_row(none: int) -> None:
    routing = tokenyard.route(torch.tensor([[none, 1], [0, none]]), 3)
    assert conventions.to_sorted_slots(routing).tolist() == [2, 1, -1, -1]
    assert conventions.to_row_id_map(routing).tolist() == [-1, 0, 1, -1]
    assert conventions.to_scatter_indices(routing).tolist() == [-1, 1, 0, -1]
    assert conventions.to_mask_map(routing)[:, [0, -1]].tolist() == [[1, 1], [0, 1]]
    assert conventions.to_sorted_tokens(routing).tolist() == [1, 0, -1, -1]
    assert conventions.to_inverse_map(routing).tolist() == [
        [[1, -1], [0, -1]],
        [[1, -1], [0, -1]],
    ]
    assert conventions.to_expert_of_row(routing).tolist() == [0, 1, -1, -1]


def test_trap_7_few_rows_cut_the_highest_experts() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
    routing = conventions.from_routing_map(mask, top_k=2, num_rows=8).validate()
    assert routing.tokens_per_expert.tolist() == [3, 4, 1]
    assert conventions.to_sorted_tokens(routing).tolist() == F[:8]
    assert routing.num_dropped == 2


def test_fan_out_past_its_bound_is_dropped_and_counted() -> None:
    mask = torch.tensor([[0, 5, -1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    routing = conventions.from_routing_map(mask, top_k=2).validate()
    assert routing.topk_indices.tolist() == [[1, 2], [-1, -1], [0, 1]]
    assert routing.num_dropped == 3
    wide = conventions.from_routing_map(mask, top_k=6).validate()
    assert wide.topk_indices.tolist()[0] == [1, 2, 3, -1, -1, -1]
    assert wide.num_dropped == 0
    mask_map = conventions.to_mask_map(wide)
    assert_same(conventions.from_mask_map(mask_map, top_k=6), wide)


def every_conversion(routing: Routing, num_tokens: int) -> list[Any]:
    """All functions, so that a new one cannot be left out."""
    offsets, top_k = routing.expert_offsets, routing.top_k
    rest = layout(routing)
    slots = conventions.to_sorted_slots(routing)
    row_id_map, moe_ops_offsets = conventions.to_moe_ops_map(routing)
    padded_bins, bins = conventions.to_padded_bins(routing)
    expert_of_row = conventions.to_expert_of_row(routing)
    mask_map = conventions.to_mask_map(routing)
    tokens = conventions.to_sorted_tokens(routing)
    return [
        conventions.from_sorted_slots(slots, offsets, top_k, num_tokens, **rest),
        conventions.from_row_id_map(conventions.to_row_id_map(routing), offsets, top_k, **rest),
        conventions.from_scatter_indices(
            conventions.to_scatter_indices(routing), offsets, top_k, **rest
        ),
        conventions.from_moe_ops_map(row_id_map, moe_ops_offsets, top_k, **rest),
        mask_map,
        conventions.from_mask_map(mask_map, offsets, top_k, **rest),
        conventions.from_mask_map(mask_map, top_k=top_k, num_rows=routing.num_rows),
        conventions.from_sorted_tokens(tokens, offsets, num_tokens, top_k, **rest),
        conventions.from_inverse_map(conventions.to_inverse_map(routing), offsets, **rest),
        conventions.from_routing_map(conventions.to_routing_map(routing), top_k=top_k),
        conventions.from_group_ends(conventions.to_group_ends(routing)),
        conventions.from_group_counts(conventions.to_group_counts(routing)),
        conventions.from_padded_bins(padded_bins, bins),
        conventions.from_expert_of_row(expert_of_row, routing.num_experts),
    ]


def test_no_conversion_reads_a_value(example: Routing) -> None:
    """A fake tensor has no values: what would synchronise a GPU raises here."""
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, example)
        results = every_conversion(fake, 5)
    for got, expected in zip(
        pytree.tree_leaves(results), pytree.tree_leaves(every_conversion(example, 5))
    ):
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype


def test_every_conversion_compiles_whole_without_recompiling() -> None:
    torch._dynamo.reset()

    def convert(ids: Tensor) -> list[Any]:
        return every_conversion(tokenyard.route(ids, 3), ids.shape[0])

    compiled = torch.compile(convert, fullgraph=True, dynamic=True, backend="eager")
    for num_tokens in (5, 9, 40):
        ids = torch.randint(-1, 4, (num_tokens, 2))
        with torch.compiler.set_stance("default" if num_tokens == 5 else "fail_on_recompile"):
            results = compiled(ids)
        for got, expected in zip(pytree.tree_leaves(results), pytree.tree_leaves(convert(ids))):
            assert torch.equal(got, expected)


def test_every_function_is_covered() -> None:
    names = {name for name in vars(conventions) if re.match(r"(to|from)_", name)}
    used = every_conversion.__code__.co_names
    assert names <= set(used)
    assert {name.replace("to_", "from_", 1) for name in names if name.startswith("to_")} <= names


FLAT = torch.arange(10)
MASK = torch.zeros(5, 7, dtype=torch.int32)
SLOT_MAPS = {
    "from_sorted_slots": "sorted_slots",
    "from_row_id_map": "row_id_map",
    "from_scatter_indices": "scatter_indices",
    "from_moe_ops_map": "row_id_map",
}
BAD_SLOT_MAPS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("{map}", (FLAT.tolist(), OFFSETS, 2), {}),
    ("{map}", (FLAT.view(5, 2), OFFSETS, 2), {}),
    ("{map}", (FLAT.float(), OFFSETS, 2), {}),
    ("len({map})", (FLAT, OFFSETS, 3), {}),
    ("top_k", (FLAT, OFFSETS, 0), {}),
    ("expert_offsets", (FLAT, OFFSETS.float(), 2), {}),
    ("expert_offsets", (FLAT, OFFSETS[None], 2), {}),
    ("expert_offsets", (FLAT, OFFSETS.to("meta"), 2), {}),
    ("len(expert_offsets)", (FLAT, OFFSETS[:1], 2), {}),
    ("row_alignment", (FLAT, OFFSETS, 2), {"row_alignment": 0}),
    ("num_rows", (FLAT, OFFSETS, 2), {"num_rows": -1}),
    ("num_rows", (FLAT, OFFSETS, 2), {"num_rows": 10, "row_alignment": 4}),
    ("num_rows", (FLAT, OFFSETS, 2), {"num_rows": 2**31}),
    ("num_dropped", (FLAT, OFFSETS, 2), {"num_dropped": torch.zeros(2).int()}),
]
BAD: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("from_sorted_slots", "num_tokens", (FLAT, OFFSETS, 2, -1), {}),
    ("from_mask_map", "mask_map", (MASK[:, 1:],), {}),
    ("from_mask_map", "mask_map", (MASK[:, :1],), {}),
    ("from_mask_map", "mask_map", (MASK.float(),), {}),
    ("from_mask_map", "top_k", (MASK,), {"top_k": 0}),
    ("from_mask_map", "expert_offsets", (MASK, OFFSETS[1:]), {}),
    ("from_mask_map", "row_alignment", (MASK,), {"row_alignment": 0}),
    ("from_sorted_tokens", "sorted_tokens", (MASK, OFFSETS, 5, 2), {}),
    ("from_sorted_tokens", "num_tokens", (FLAT, OFFSETS, -1, 2), {}),
    ("from_sorted_tokens", "top_k", (FLAT, OFFSETS, 5, 0), {}),
    ("from_sorted_tokens", "len(expert_offsets)", (FLAT, FLAT[:0], 5, 2), {}),
    ("from_inverse_map", "inverse_map", (MASK, OFFSETS), {}),
    ("from_inverse_map", "inverse_map", (MASK[None], OFFSETS), {}),
    ("from_inverse_map", "inverse_map.shape[2]", (FLAT[:0].view(2, 5, 0), OFFSETS), {}),
    ("from_routing_map", "routing_map", (MASK.float(),), {}),
    ("from_routing_map", "routing_map", (FLAT,), {}),
    ("from_routing_map", "routing_map.shape[1]", (MASK[:, :0],), {}),
    ("from_routing_map", "top_k", (MASK,), {"top_k": 0}),
    ("from_group_ends", "group_ends", (FLAT.float(),), {}),
    ("from_group_counts", "group_counts", (MASK,), {}),
    ("from_group_counts", "row_alignment", (FLAT,), {"row_alignment": 0}),
    ("from_padded_bins", "padded_bins", (MASK, FLAT), {}),
    ("from_padded_bins", "bins", (FLAT, FLAT[1:]), {}),
    ("from_expert_of_row", "expert_of_row", (MASK, 3), {}),
    ("from_expert_of_row", "num_experts", (FLAT, 0), {}),
    ("from_expert_of_row", "row_alignment", (FLAT, 3), {"row_alignment": 0}),
    *((name, "routing", (FLAT,), {}) for name in vars(conventions) if name.startswith("to_")),
    *(
        (name, argument.format(map=map_name), args, kwargs)
        for name, map_name in SLOT_MAPS.items()
        for argument, args, kwargs in BAD_SLOT_MAPS
    ),
]


@pytest.mark.parametrize(("function", "argument", "args", "kwargs"), BAD)
def test_bad_arguments(
    function: str, argument: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    message = re.escape(f"tokenyard.conventions.{function}: `{argument}`: expected")
    with pytest.raises(ArgumentError, match=message):
        getattr(conventions, function)(*args, **kwargs)


def test_values_that_int32_does_not_hold() -> None:
    far = torch.tensor([2**32 + 1, 2**32 + 5])
    most = 2**31 - 1
    assert conventions.from_group_ends(far).tolist() == [0, most, most]
    assert conventions.from_group_ends(5 - far).tolist() == [0, -most - 1, -most - 1]
    assert conventions.from_group_counts(far).tolist() == [0, most, most]
    assert conventions.from_group_counts(torch.tensor([2**62 + 1] * 4)).tolist() == [0, *4 * [most]]
    ends, counts = conventions.from_padded_bins(far, torch.tensor([most + 3, 2**33 + 1]))
    assert ends.tolist() == [0, most, most] and counts.tolist() == [most, 0]
    assert conventions.from_group_ends(torch.tensor([3, 200], dtype=torch.uint8)).tolist() == [
        0,
        3,
        200,
    ]
    offsets = torch.tensor([0, 1, 2])
    for dropped in (-3, 1.7):
        with pytest.raises(ArgumentError, match="`num_dropped`: expected"):
            conventions.from_row_id_map(torch.tensor([0, 1]), offsets, 1, num_dropped=dropped)
        with pytest.raises(ArgumentError, match="from_mask_map: `num_dropped`: expected"):
            conventions.from_mask_map(MASK, num_dropped=dropped)
    many = torch.tensor(2**32 + 1)
    routing = conventions.from_row_id_map(torch.tensor([0, 1]), offsets, 1, num_dropped=many)
    assert routing.num_dropped == most


def test_errors_of_a_mask_name_the_public_function() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    for argument, value in (("num_rows", -1), ("row_alignment", 0), ("row_alignment", 2**30)):
        message = rf"^tokenyard\.conventions\.from_routing_map: `{argument}`: expected"
        with pytest.raises(ArgumentError, match=message):
            conventions.from_routing_map(mask, **{argument: value})
