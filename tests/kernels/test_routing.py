"""The kernels of route in the interpreter, bit for bit against the definition, on both of their paths."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import SHAPES, SPECIAL, Case, assert_same_bits, random_case, routings
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import launched
from torch import Tensor

import tokenyard
from tokenyard import Routing
from tokenyard.kernels import routing as kernels
from tokenyard.kernels.device import groups

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

FIELDS = (
    *("topk_indices", "row_of_slot", "slot_of_row", "expert_offsets", "tokens_per_expert"),
    "num_dropped",
)
TILES = {name: getattr(kernels, name) for name in ("_TILE", "_DIRECT_TILE", "_DIRECT_CHUNK")}


def clear_launchers() -> None:
    """They keep the tile that they were made with."""
    for module in (kernels, groups):
        for name in vars(module):
            if name.endswith(("_launcher", "_launchers")):
                getattr(module, name).cache_clear()


@pytest.fixture(params=["one launch", "three launches"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either path, with tiles of 32 slots: the interpreter sorts a full one in a second."""
    monkeypatch.setattr(kernels, "DIRECT_SLOTS", 1 << 30 if request.param == "one launch" else 0)
    for name in TILES:
        monkeypatch.setattr(kernels, name, 32)
    clear_launchers()
    yield request.param
    clear_launchers()


def check(ids_TK: Tensor, num_experts: int, **options: Any) -> Routing:
    got, names = launched(lambda: tokenyard.route(ids_TK, num_experts, **options))
    assert names
    with tokenyard.use("reference"):
        want = tokenyard.route(ids_TK, num_experts, **options)
    for field in FIELDS:
        assert_same_bits(getattr(got, field), getattr(want, field))
    return got.validate()


def check_case(case: Case, **options: Any) -> None:
    ids_TK = torch.tensor(case.topk_indices, dtype=torch.int64)
    got = check(
        ids_TK.reshape(case.num_tokens, case.top_k),
        case.num_experts,
        row_alignment=case.row_alignment,
        num_rows=case.num_rows,
        **options,
    )
    if not options:
        assert got.slot_of_row.tolist() == case.slot_of_row()


def random_ids(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Any ids from -1 to E: both kinds of "no expert", and duplicates."""
    return torch.randint(-1, num_experts + 1, (num_tokens, top_k))


def test_each_path_has_its_launches(path: str) -> None:
    _, names = launched(lambda: tokenyard.route(random_ids(5, 3, 2), 3))
    assert len(names) == (1 if path == "one launch" else 3)


def test_few_slots_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DIRECT_SLOTS", 6)
    for num_tokens, launches in ((3, 1), (4, 3)):
        _, names = launched(lambda n=num_tokens: tokenyard.route(random_ids(n, 3, 2), 3))
        assert len(names) == launches


@pytest.mark.parametrize("name", SPECIAL)
def test_special_routings(name: str, poisoned_memory: None) -> None:
    check_case(SPECIAL[name])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("row_alignment", [1, 16])
def test_shapes_of_models(
    shape: tuple[int, ...], row_alignment: int, poisoned_memory: None
) -> None:
    num_tokens, _, num_experts, top_k = shape
    check_case(random_case(num_tokens, num_experts, top_k, row_alignment))


@settings(max_examples=8)
@given(routings(), st.none() | st.integers(0, 3))
def test_drawn_routings(case: Case, capacity: int | None) -> None:
    check_case(case, **({} if capacity is None else {"capacity": capacity}))


@pytest.mark.parametrize("num_slots", [31, 32, 33, 63, 64, 65, 97])
def test_slots_at_a_block_boundary(num_slots: int, poisoned_memory: None) -> None:
    check(random_ids(num_slots, 5, 1), 5, row_alignment=2)


@pytest.mark.parametrize("slots_more", [-1, 0, 1])
def test_slots_at_the_boundary_of_a_full_tile(
    slots_more: int, path: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    for name, tile in TILES.items():
        monkeypatch.setattr(kernels, name, tile)
    tile = TILES["_DIRECT_TILE" if path == "one launch" else "_TILE"]
    check(random_ids(tile + slots_more, 60, 1), 60, row_alignment=4)


@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 95, 96, 97, 1000])
def test_rows_at_a_block_boundary(num_rows: int, poisoned_memory: None) -> None:
    """Too few rows and too many: no slot is written past them, and every other row is padding."""
    check(random_ids(20, 3, 3), 3, num_rows=num_rows)


@pytest.mark.parametrize("num_experts", [1, 2, 3, 31, 32, 62, 63, 64, 127, 384, 1024])
def test_experts_about_a_power_of_two(num_experts: int, poisoned_memory: None) -> None:
    check(random_ids(20, num_experts, 3), num_experts, row_alignment=4)


@pytest.mark.parametrize("top_k", [1, 3, 22, 60])
def test_choices(top_k: int, poisoned_memory: None) -> None:
    check_case(random_case(7, 60, top_k))


@pytest.mark.parametrize("capacity", [0, 1, 7, 10_000])
def test_capacity(capacity: int, poisoned_memory: None) -> None:
    ids_TK = random_ids(24, 6, 3)
    check(ids_TK, 6, capacity=capacity)
    check(ids_TK, 6, capacity=capacity, row_alignment=8, num_rows=200)
    check(ids_TK, 6, capacity=capacity, num_rows=20)


def test_capacity_drops_the_least_weights() -> None:
    """No kernel does this; the definition serves within the same call."""
    ids_TK = random_ids(30, 4, 2)
    options = {"capacity": 5, "drop": "weight", "topk_weights": torch.rand(30, 2)}
    got, _ = launched(lambda: tokenyard.route(ids_TK, 4, **options))
    want = tokenyard.route(ids_TK, 4, **options)
    for field in FIELDS:
        assert_same_bits(getattr(got, field), getattr(want, field))


@pytest.mark.parametrize("row_alignment", [1, 3, 16, 128])
def test_empty_and_full_experts(row_alignment: int, poisoned_memory: None) -> None:
    """Empty experts first, last and between; one that takes all."""
    for allowed in ([2, 5], [0], [8], [3, 4, 5]):
        ids_TK = torch.tensor(allowed)[torch.randint(len(allowed), (25, 2))]
        check(ids_TK, 9, row_alignment=row_alignment)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_dtypes_of_ids(dtype: torch.dtype, poisoned_memory: None) -> None:
    ids_TK = random_ids(20, 60, 4)
    if dtype == torch.uint8:
        ids_TK = ids_TK.clamp(min=0)
    check(ids_TK.to(dtype), 60)


def test_more_experts_than_the_dtype_holds(poisoned_memory: None) -> None:
    check(torch.randint(-1, 128, (30, 2)).to(torch.int8), 300)
    for num_experts in (256, 300):
        check(torch.randint(0, 256, (11, 3)).to(torch.uint8), num_experts, row_alignment=4)


def test_unchecked_ids_write_nowhere(poisoned_memory: None) -> None:
    far = [2**31, 2**32, 2**32 + 1, 2**62, -(2**31), -(2**32), -(2**62), 5, 7, -2]
    ids_TK = torch.tensor([[expert, slot % 5] for slot, expert in enumerate(far)])
    routing = check(ids_TK, 5, validate=False)
    assert routing.topk_indices[:, 0].tolist() == [-1] * len(far)
    assert routing.num_dropped.item() == 0
    check(torch.tensor([[-128, 3], [127, 0]], dtype=torch.int8), 5, validate=False)


def test_strides_of_ids(poisoned_memory: None) -> None:
    base = random_ids(12, 6, 8)
    for ids_TK in (
        base.T,
        base[:, 1:4],
        base[::3],
        base[:, :1].expand(12, 3),
        base[0].expand(9, 8),
    ):
        check(ids_TK, 6)
    unaligned = base.flatten().to(torch.int32)[1:91].view(30, 3)
    assert unaligned.data_ptr() % 16
    check(unaligned, 6)


def test_more_tiles_than_one_step_of_the_scan(
    path: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    """Counts of an expert are carried from one step to the next."""
    if path == "one launch":
        pytest.skip("it has no scan")
    monkeypatch.setattr(groups, "SCAN_TILES", 2)
    for num_slots in (64, 65, 150):
        check(random_ids(num_slots, 11, 1), 11, row_alignment=5)
