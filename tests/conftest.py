"""Fixtures of every test: seeds, one thread per worker, poisoned memory, GPU skips."""

import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so set before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# The first call of an operator compiles; no example has a deadline.
settings.register_profile("tokenyard", deadline=None)
settings.load_profile("tokenyard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch and random from the test's name: the same in any order and on any worker."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN, or the largest integer.

    A kernel that leaves an element unwritten then shows it.
    """
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_deterministic_debug_mode(mode)
