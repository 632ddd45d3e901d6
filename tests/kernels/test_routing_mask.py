"""The kernels of route_mask in the interpreter, bit for bit against the definition."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import assert_same_bits
from launches import launched
from torch import Tensor

from tokenyard import use
from tokenyard.conventions import from_routing_map
from tokenyard.kernels import routing_mask as kernels
from tokenyard.routing import Routing

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 4 tokens for few experts, so that a few tokens make several tiles."""
    monkeypatch.setattr(kernels, "_MASK_ELEMENTS", 256)
    kernels._launchers.cache_clear()
    yield
    kernels._launchers.cache_clear()


def random_mask(num_tokens: int, num_experts: int, density: float = 0.3) -> Tensor:
    """Fan-outs from none to all."""
    return torch.rand(num_tokens, num_experts) < density * torch.rand(num_tokens, 1) * 2


def check(mask_TE: Tensor, **options: Any) -> Routing:
    got, names = launched(lambda: from_routing_map(mask_TE, **options))
    assert len(names) == 3
    with use("reference"):
        want = from_routing_map(mask_TE, **options)
    for field in (
        *("topk_indices", "row_of_slot", "slot_of_row", "expert_offsets", "tokens_per_expert"),
        "num_dropped",
    ):
        assert_same_bits(getattr(got, field), getattr(want, field))
    return got.validate()


@pytest.mark.parametrize("shape", [(1, 1), (13, 5), (9, 64), (30, 63), (3, 257)], ids=str)
def test_any_fan_out(shape: tuple[int, int], poisoned_memory: None) -> None:
    check(random_mask(*shape))
    check(torch.zeros(shape, dtype=torch.bool))
    check(torch.ones(shape, dtype=torch.bool))


def test_most_experts(poisoned_memory: None) -> None:
    check(random_mask(3, 4096, 0.01), top_k=128)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_but_zero_is_one(dtype: torch.dtype) -> None:
    check(random_mask(11, 6).to(dtype) * (-3 if dtype.is_signed else 255))


def test_strides() -> None:
    mask_TE = random_mask(11, 6)
    check(mask_TE.t().contiguous().t())
    check(torch.stack([~mask_TE, mask_TE], 2)[:, :, 1])
    check(mask_TE[:1].expand(9, 6))
    check(mask_TE[:, :1].expand(11, 5))
    check(mask_TE.flatten()[1:61].view(10, 6))  # not aligned


def test_one_kernel_serves_every_number_of_tokens() -> None:
    for num_tokens in (4, 7):
        check(random_mask(num_tokens, 6).t().contiguous().t(), top_k=3)
    assert kernels._launchers.cache_info().misses == 1


@pytest.mark.parametrize("top_k", [1, 2, 3, 7])
@pytest.mark.parametrize("row_alignment", [1, 4])
def test_bounds(top_k: int, row_alignment: int, poisoned_memory: None) -> None:
    for num_rows in (0, 8, 20, 200):
        options = {"top_k": top_k, "num_rows": num_rows, "row_alignment": row_alignment}
        check(random_mask(14, 7, 0.5), **options)


def test_no_tokens(poisoned_memory: None) -> None:
    routing = check(torch.zeros(0, 5, dtype=torch.bool), top_k=2, num_rows=6)
    assert routing.slot_of_row.tolist() == [-1] * 6
    assert int(routing.num_dropped) == 0
