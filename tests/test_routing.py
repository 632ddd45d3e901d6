"""route and Routing against literal loops, and every invariant that `validate` guards."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tokenyard
from tokenyard import Routing
from tokenyard.check import INTEGER_DTYPES, ArgumentError

FIELDS = [
    "topk_indices",
    "row_of_slot",
    "slot_of_row",
    "expert_offsets",
    "tokens_per_expert",
    "num_dropped",
]
DTYPES = sorted(INTEGER_DTYPES, key=str)


@pytest.fixture(autouse=True, scope="module", params=["slot by slot", "by tensors"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of the CPU, whatever the number of slots."""
    with pytest.MonkeyPatch.context() as patch:
        most = 10**9 if request.param == "slot by slot" else -1
        patch.setattr(tokenyard.routing, "FEW_SLOTS", most)
        yield


def in_loops(
    ids: list[list[int]],
    top_k: int,
    num_experts: int,
    row_alignment: int = 1,
    num_rows: int | None = None,
    capacity: int | None = None,
    weights: list[float] | None = None,
) -> dict[str, Any]:
    """What `route` must give, one slot at a time."""
    flat = [expert for choices in ids for expert in choices]
    slot_of_row: list[int] = []
    starts = []
    for expert in range(num_experts):
        starts.append(len(slot_of_row))
        slots = [slot for slot, chosen in enumerate(flat) if chosen == expert]
        if weights is not None:
            slots = sorted(slots, key=lambda slot: -weights[slot])
        slot_of_row += sorted(slots[:capacity])
        while len(slot_of_row) % row_alignment:
            slot_of_row.append(-1)
    starts.append(len(slot_of_row))
    if num_rows is None:
        num_rows = len(flat) + min(num_experts, len(flat)) * (row_alignment - 1)
        while num_rows % row_alignment:
            num_rows -= 1
        assert len(slot_of_row) <= num_rows
    while len(slot_of_row) < num_rows:
        slot_of_row.append(-1)
    slot_of_row = slot_of_row[:num_rows]
    row_of_slot = [slot_of_row.index(s) if s in slot_of_row else -1 for s in range(len(flat))]
    kept = [expert if row >= 0 else -1 for expert, row in zip(flat, row_of_slot)]
    named = sum(0 <= expert < num_experts for expert in flat)

    def by_token(values: list[int]) -> list[list[int]]:
        return [values[token * top_k : (token + 1) * top_k] for token in range(len(ids))]

    return {
        "topk_indices": by_token(kept),
        "row_of_slot": by_token(row_of_slot),
        "slot_of_row": slot_of_row,
        "expert_offsets": [min(start, num_rows) for start in starts],
        "tokens_per_expert": [kept.count(expert) for expert in range(num_experts)],
        "num_dropped": named - sum(row >= 0 for row in row_of_slot),
        "token_of_row": [slot // top_k if slot >= 0 else -1 for slot in slot_of_row],
        "expert_of_row": [flat[slot] if slot >= 0 else -1 for slot in slot_of_row],
    }


def assert_is(routing: Routing, expected: dict[str, Any]) -> None:
    routing.validate()
    for name, values in expected.items():
        got = getattr(routing, name)
        assert got.dtype == torch.int32, name
        assert got.tolist() == values, name


@st.composite
def arguments(draw: Callable[..., Any], max_tokens: int = 24) -> tuple[Tensor, dict[str, Any]]:
    """Ids from -1 to E with duplicates, of few experts or of all, in [T,K]; and how to lay out."""
    num_experts, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    num_tokens = draw(st.integers(0, max_tokens))
    choices = draw(st.lists(st.integers(-1, num_experts), min_size=1, unique=True))
    drawn = draw(st.binary(min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    ids = torch.tensor([choices[byte % len(choices)] for byte in drawn], dtype=torch.int64)
    row_alignment = draw(st.sampled_from([1, 1, 2, 3, 16]))
    num_rows = draw(st.none() | st.integers(0, 40).map(lambda blocks: blocks * row_alignment))
    layout = {"num_experts": num_experts, "row_alignment": row_alignment, "num_rows": num_rows}
    return ids.view(num_tokens, top_k), layout


@pytest.mark.usefixtures("poisoned_memory")
@given(arguments(), st.none() | st.integers(0, 6), st.data())
def test_route_is_the_loops(
    drawn: tuple[Tensor, dict[str, Any]], capacity: int | None, data: st.DataObject
) -> None:
    ids, layout = drawn
    expected = in_loops(ids.tolist(), ids.shape[1], **layout, capacity=capacity)
    assert_is(tokenyard.route(ids, **layout, capacity=capacity), expected)

    bytes_ = data.draw(st.binary(min_size=ids.numel(), max_size=ids.numel()))
    weights = torch.tensor([byte % 4 / 4 for byte in bytes_])  # with many ties
    expected = in_loops(
        ids.tolist(), ids.shape[1], **layout, capacity=capacity, weights=weights.tolist()
    )
    routing = tokenyard.route(
        ids, **layout, capacity=capacity, drop="weight", topk_weights=weights.view(ids.shape)
    )
    assert_is(routing, expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("row_alignment", [1, 128])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        (0, 3, 2),
        (1, 1, 1),
        (40, 1, 1),
        (33, 3, 3),
        (50, 6, 6),
        (20, 60, 22),
        (33, 72, 8),
        (40, 160, 6),
        (20, 384, 8),
        (1023, 3, 1),
        (1025, 3, 1),
    ],
)
def test_real_expert_counts(
    num_tokens: int, num_experts: int, top_k: int, row_alignment: int
) -> None:
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k]
    routing = tokenyard.route(ids, num_experts, row_alignment=row_alignment)
    assert_is(routing, in_loops(ids.tolist(), top_k, num_experts, row_alignment))
    assert routing.num_dropped == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integer_dtypes(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 7, (12, 3))  # 6 = E
    if dtype.is_signed:
        ids[ids == 5] = -1
    expected = in_loops(ids.tolist(), 3, 6, 4)
    assert_is(tokenyard.route(ids.to(dtype), 6, row_alignment=4), expected)


@pytest.mark.parametrize(
    "strided",
    [
        lambda ids: ids.t().contiguous().t(),
        lambda ids: torch.stack([ids, ids + 1], dim=-1)[..., 0],
        lambda ids: torch.cat([ids, ids])[12:],
        lambda ids: ids[::2],
        lambda ids: ids[:1].expand(12, 3),
        lambda ids: ids[:, :1].expand(12, 3),
    ],
)
def test_strides(strided: Callable[[Tensor], Tensor]) -> None:
    ids = strided(torch.randint(-1, 7, (12, 3)))
    assert_is(tokenyard.route(ids, 6), in_loops(ids.tolist(), 3, 6))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("row_alignment", [1, 4])
def test_nothing_routed(top_k: int, row_alignment: int) -> None:
    for ids in (torch.full((5, top_k), -1), torch.full((5, top_k), 4)):
        routing = tokenyard.route(ids, 4, row_alignment=row_alignment)
        assert_is(routing, in_loops(ids.tolist(), top_k, 4, row_alignment))
        assert routing.num_dropped == 0
        assert (routing.slot_of_row == -1).all()
        assert (routing.expert_offsets == 0).all()


@pytest.mark.parametrize("expert", [0, 2, 5])
def test_one_expert_takes_all(expert: int) -> None:
    routing = tokenyard.route(torch.full((9, 2), expert), 6, row_alignment=4)
    assert_is(routing, in_loops([[expert] * 2] * 9, 2, 6, 4))
    assert routing.tokens_per_expert[expert] == 18


def test_too_few_rows_drop_the_highest_experts() -> None:
    ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
    routing = tokenyard.route(ids, 3, num_rows=6).validate()
    assert routing.tokens_per_expert.tolist() == [3, 3, 0]
    assert routing.num_dropped == 4
    assert routing.topk_indices.tolist() == [[1, 0], [-1, 0], [-1, 1], [0, 1], [-1, -1]]


def test_too_many_rows_are_padding() -> None:
    routing = tokenyard.route(torch.tensor([[1, 0], [2, 0]]), 3, num_rows=9).validate()
    assert routing.slot_of_row.tolist() == [1, 3, 0, 2, -1, -1, -1, -1, -1]
    assert routing.expert_offsets.tolist() == [0, 2, 3, 4]
    assert routing.num_dropped == 0


def test_capacity_drops_the_latest_or_the_lightest() -> None:
    ids = torch.tensor([[0], [0], [1], [0]])
    weights = torch.tensor([[0.25], [0.5], [0.1], [0.75]], requires_grad=True)
    latest = tokenyard.route(ids, 2, capacity=2).validate()
    assert latest.topk_indices.flatten().tolist() == [0, 0, 1, -1]
    lightest = tokenyard.route(ids, 2, capacity=2, drop="weight", topk_weights=weights).validate()
    assert lightest.topk_indices.flatten().tolist() == [-1, 0, 1, 0]
    assert lightest.slot_of_row.tolist()[:3] == [1, 3, 2]
    assert latest.num_dropped == lightest.num_dropped == 1


@pytest.mark.parametrize("num_tokens", [257, 4097, 16385])
@pytest.mark.parametrize("row_alignment", [2, 16, 4096])
def test_padding_is_integer_arithmetic(num_tokens: int, row_alignment: int) -> None:
    """A `ceil` in a float type takes 4097 for 4096."""
    routing = tokenyard.route(torch.zeros(num_tokens, 1, dtype=torch.int8), 1, row_alignment=1)
    assert routing.expert_offsets.tolist() == [0, num_tokens]
    ids = torch.arange(2 * num_tokens).remainder(2).view(-1, 1)
    routing = tokenyard.route(ids, 2, row_alignment=row_alignment)
    end = -(-num_tokens // row_alignment) * row_alignment
    assert routing.expert_offsets.tolist() == [0, end, 2 * end]
    assert routing.tokens_per_expert.tolist() == [num_tokens, num_tokens]
    assert routing.num_dropped == 0


WILD = [-(2**63), -(2**32), -2, 5, 2**31, 2**32, 2**32 + 1, 2**63 - 1]


def test_unchecked_ids_out_of_range_have_no_row() -> None:
    ids = torch.tensor([[wild, 1] for wild in WILD])
    routing = tokenyard.route(ids, 3, validate=False)
    expected = in_loops([[-1, 1]] * len(WILD), 2, 3)
    assert_is(routing, expected)
    assert routing.num_dropped == 0


@pytest.mark.parametrize("wild", WILD)
def test_ids_out_of_range_raise_on_the_cpu(wild: int) -> None:
    ids = torch.tensor([[0, wild]])
    for validate in (None, True):
        with pytest.raises(ArgumentError, match=rf"route: `topk_indices`: .* -1 to 3.*{wild}"):
            tokenyard.route(ids, 3, validate=validate)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("topk_indices", {"topk_indices": [[0, 1]]}),
        ("topk_indices", {"topk_indices": torch.zeros(4, dtype=torch.int64)}),
        ("topk_indices", {"topk_indices": torch.zeros(4, 2)}),
        ("topk_indices", {"topk_indices": torch.zeros(4, 2, dtype=torch.bool)}),
        ("topk_indices.shape[1]", {"topk_indices": torch.zeros(4, 0, dtype=torch.int64)}),
        ("num_experts", {"num_experts": 0}),
        ("row_alignment", {"row_alignment": 0}),
        ("num_rows", {"num_rows": -1}),
        ("num_rows", {"num_rows": 6, "row_alignment": 4}),
        ("num_rows", {"num_rows": 2**31}),
        ("capacity", {"capacity": -1}),
        ("drop", {"drop": "weights"}),
        ("topk_weights", {"drop": "weight", "capacity": 2}),
        ("topk_weights", {"drop": "weight", "topk_weights": torch.ones(2, 4)}),
        ("topk_weights", {"drop": "weight", "topk_weights": torch.ones(4, 2).int()}),
        ("topk_weights", {"drop": "weight", "topk_weights": torch.ones(4, 2, device="meta")}),
    ],
)
def test_bad_arguments(argument: str, values: dict[str, Any]) -> None:
    good = {"topk_indices": torch.zeros(4, 2, dtype=torch.int64), "num_experts": 3}
    with pytest.raises(ArgumentError, match=re.escape(f"tokenyard.route: `{argument}`: expected")):
        tokenyard.route(**(good | values))


@pytest.fixture
def routing() -> Routing:
    """Padding inside and after the ranges, and a slot without a row."""
    ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, -1], [1, 2]])
    routing = tokenyard.route(ids, 3, row_alignment=4, num_rows=16).validate()
    assert routing.slot_of_row.tolist() == [1, 3, 6, -1, 0, 5, 8, -1, 2, 4, 9, *[-1] * 5]
    return routing


def put(tensor: Tensor, **values: int) -> Tensor:
    """A copy with flat entries `_<index>` changed."""
    changed = tensor.clone()
    for index, value in values.items():
        changed.view(-1)[int(index[1:])] = value
    return changed


@pytest.mark.parametrize("name", FIELDS)
def test_validate_checks_dtype_shape_device(routing: Routing, name: str) -> None:
    field = getattr(routing, name)

    def rejects(value: Tensor, invariant: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"invariant broken: {invariant}")):
            replace(routing, **{name: value}).validate()

    rejects(field.long(), f"{name} is int32, not torch.int64")
    if name == "topk_indices":
        rejects(field[1:], "row_of_slot has shape [4, 2], not [5, 2]")
        rejects(field[0], "topk_indices has shape [T, K], not [2]")
        rejects(field.to("meta"), "row_of_slot is on meta")
    else:
        rejects(field[None].expand(2, *field.shape), f"{name} has shape")
        rejects(field.to("meta"), f"{name} is on cpu")


@pytest.mark.parametrize(
    ("invariant", "corrupt"),
    [
        ("-1 <= topk_indices < num_experts", {"topk_indices": {"_0": 3}}),
        ("-1 <= topk_indices < num_experts", {"topk_indices": {"_0": -2}}),
        ("-1 <= row_of_slot < num_rows", {"row_of_slot": {"_0": 16}}),
        ("-1 <= row_of_slot < num_rows", {"row_of_slot": {"_0": -2}}),
        ("-1 <= slot_of_row < T*K", {"slot_of_row": {"_0": 10}}),
        ("-1 <= slot_of_row < T*K", {"slot_of_row": {"_3": -2}}),
        ("expert_offsets[0] == 0", {"expert_offsets": {"_0": 4}}),
        ("expert_offsets never decreases", {"expert_offsets": {"_1": 12}}),
        ("expert_offsets[E] <= num_rows", {"expert_offsets": {"_3": 20}}),
        ("expert_offsets are aligned", {"expert_offsets": {"_1": 5}}),
        ("tokens_per_expert fits its range", {"tokens_per_expert": {"_0": 5}}),
        ("tokens_per_expert fits its range", {"tokens_per_expert": {"_0": -1}}),
        ("num_dropped >= 0", {"num_dropped": {"_0": -1}}),
        ("a slot has a row exactly if it has an expert", {"topk_indices": {"_7": 1}}),
        ("a slot has a row exactly if it has an expert", {"topk_indices": {"_0": -1}}),
        ("slot_of_row[row_of_slot[s]] == s", {"row_of_slot": {"_1": 1, "_3": 0}}),
        ("every row that names a slot is that slot's row", {"slot_of_row": {"_3": 1}}),
        ("a row lies in the range of its slot's expert", {"topk_indices": {"_0": 0, "_1": 1}}),
        (
            "a row lies in the range of its slot's expert",  # past the last range
            {"row_of_slot": {"_9": 12}, "slot_of_row": {"_10": -1, "_12": 9}},
        ),
        (
            "padding is each range's tail",
            {"row_of_slot": {"_6": 3}, "slot_of_row": {"_2": -1, "_3": 6}},
        ),
        ("tokens_per_expert counts the valid rows", {"tokens_per_expert": {"_1": 4}}),
        (
            "rows of one expert are in increasing slot order",
            {"row_of_slot": {"_1": 1, "_3": 0}, "slot_of_row": {"_0": 3, "_1": 1}},
        ),
    ],
)
def test_validate_names_the_broken_invariant(
    routing: Routing, invariant: str, corrupt: dict[str, dict[str, int]]
) -> None:
    fields = {name: put(getattr(routing, name), **values) for name, values in corrupt.items()}
    with pytest.raises(ValueError, match=re.escape(f"invariant broken: {invariant}")):
        replace(routing, **fields).validate()


def test_properties_and_repr(routing: Routing) -> None:
    assert (routing.num_tokens, routing.top_k, routing.num_rows) == (5, 2, 16)
    assert routing.token_of_row.tolist() == [0, 1, 3, -1, 0, 2, 4, -1, 1, 2, 4, *[-1] * 5]
    assert routing.expert_of_row.tolist() == [0, 0, 0, -1, 1, 1, 1, -1, 2, 2, 2, *[-1] * 5]
    assert repr(routing) == (
        "Routing(num_tokens=5, top_k=2, num_experts=3, num_rows=16, row_alignment=4, device=cpu)"
    )
    with pytest.raises(AttributeError):
        routing.num_experts = 4  # type: ignore[misc]


def test_to_moves_every_tensor(routing: Routing) -> None:
    moved = routing.to("meta")
    assert moved.device.type == "meta"
    assert all(getattr(moved, name).is_meta for name in FIELDS)
    assert (moved.num_experts, moved.row_alignment, moved.num_rows) == (3, 4, 16)
    assert_same(routing.to("cpu"), routing)


def assert_same(got: Routing, expected: Routing) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert (got.num_experts, got.row_alignment) == (expected.num_experts, expected.row_alignment)


def test_pytree(routing: Routing) -> None:
    leaves, spec = pytree.tree_flatten({"routing": routing, "rest": [torch.ones(1)]})
    assert len(leaves) == len(FIELDS) + 1
    assert_same(pytree.tree_unflatten(leaves, spec)["routing"], routing)
    with_paths, _ = pytree.tree_flatten_with_path(routing)
    assert [pytree.keystr(path) for path, _ in with_paths] == [f".{name}" for name in FIELDS]
    _, spec = pytree.tree_flatten(routing)
    restored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert_same(
        pytree.tree_unflatten([getattr(routing, name) for name in FIELDS], restored), routing
    )
    doubled = pytree.tree_map(lambda tensor: tensor + tensor, routing)
    assert torch.equal(doubled.slot_of_row, 2 * routing.slot_of_row)


@pytest.mark.parametrize("options", [{}, {"row_alignment": 4}, {"capacity": 3}])
def test_compiles_whole_without_recompiling(options: dict[str, int]) -> None:
    torch._dynamo.reset()

    def step(ids: Tensor, x: Tensor) -> tuple[Routing, Tensor]:
        routing = tokenyard.route(ids, 6, **options)
        return routing, x[routing.token_of_row.clamp(min=0)]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 7, 64, 1023):
        ids, x = torch.randint(-1, 7, (num_tokens, 3)), torch.randn(num_tokens, 8)
        with torch.compiler.set_stance("default" if num_tokens == 5 else "fail_on_recompile"):
            routing, rows = compiled(ids, x)
        expected, expected_rows = step(ids, x)
        assert isinstance(routing, Routing)
        assert_same(routing.validate(), expected)
        assert torch.equal(rows, expected_rows)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(routing: Routing, use_reentrant: bool) -> None:
    x = torch.randn(5, 8, requires_grad=True)

    def layer(x: Tensor, routing: Routing) -> Tensor:
        rows = x[routing.token_of_row.clamp(min=0)] * (routing.slot_of_row >= 0)[:, None]
        return rows.sin()

    (expected,) = torch.autograd.grad(layer(x, routing).square().sum(), x)
    layer_out = checkpoint(layer, x, routing, use_reentrant=use_reentrant)
    layer_out.square().sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    "arguments",
    [
        (3, 1, 10, None, None),
        (3, 4, 16, 2, None),
        (3, 1, 4, None, torch.rand(5, 2)),
        (3, 1, 0, 0, torch.rand(5, 2)),
    ],
)
def test_registered_operator(arguments: tuple[Any, ...]) -> None:
    ids = torch.tensor([[1, 0], [2, 0], [2, 1], [0, -1], [3, 2]])
    torch.library.opcheck(torch.ops.tokenyard.route.default, (ids, *arguments))


def test_route_leaves_its_argument_alone() -> None:
    ids = torch.tensor([[1, 0], [2, 0], [2, -1]], dtype=torch.int32)
    before = ids.clone()
    routing = tokenyard.route(ids, 3, num_rows=2)
    assert torch.equal(ids, before)
    assert routing.topk_indices.data_ptr() != ids.data_ptr()


def test_rows_of_all_slots_are_counted_in_int32() -> None:
    """Also where `num_rows` keeps few of them: sums must not wrap around."""
    ids_TK = torch.arange(4096)[:, None]
    with pytest.raises(ArgumentError, match=r"`row_alignment`: expected T\*K \+ .* below 2\^31"):
        tokenyard.route(ids_TK, 4096, row_alignment=2**20, num_rows=2**20)
