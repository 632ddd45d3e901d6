"""The benchmark of expert parallelism runs on the CPU; its formulas against drawn routings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import costs
from benchmarks.shapes import Shape
from tokenyard import route
from tokenyard.parallel import AllToAll, Capacity
from tokenyard.parallel.transports import plan

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_it_checks_then_times(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--tiny", "--tokens", "48", "--repeats", "1", "--json", str(file)]
    cases = ["--cases", "mesh", "sweep", "exchange", "layer", "routings"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*run, "-m", "benchmarks.parallel", *options, *cases],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["num_ranks"] == 2 and result["backend"] == "gloo"
    rows = result["results"]
    assert [row["case"] for row in rows[:5]] == ["check", "check", "mesh", "mesh", "sweep"]
    assert {row["routing"] for row in rows[-9:]} == {"uniform", "zipf", "first experts"}
    exchanges = [row for row in rows if row["case"] == "exchange"]
    assert len(exchanges) == 4
    for row in exchanges:
        if "Capacity" in row["transport"]:
            assert row["sent_bytes"] == row["expected_bytes"]
        assert all(time > 0 for time in row["milliseconds"].values())


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_ranks"), [(16, 4, 2), (64, 8, 8), (10, 3, 4)]
)
def test_expected_ranks_of_a_token(num_experts: int, top_k: int, num_ranks: int) -> None:
    torch.manual_seed(0)
    ids = torch.rand(20000, num_experts).topk(top_k).indices
    of = ids // -(-num_experts // num_ranks)
    found = torch.nn.functional.one_hot(of, num_ranks).amax(1).sum(1).double()
    want = costs.distinct_ranks(num_experts, top_k, num_ranks)
    assert abs(float(found.mean()) - want) < 5 * float(found.std()) / 20000**0.5 + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 8, 16])
@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_expected_bytes(deduplicate: bool, capacity: bool, num_ranks: int) -> None:
    """Those of the first rank, against what a drawn routing sends."""
    torch.manual_seed(0)
    shape = Shape("", T=20000, K=4, E=32, H=64, I=16)
    ids = torch.rand(shape.T, shape.E).topk(shape.K).indices
    transport: AllToAll | Capacity = AllToAll(deduplicate)
    if capacity:
        transport = costs.capacity(shape, num_ranks, 1.25, deduplicate)
    weights = torch.ones(shape.T, shape.K)
    planned = plan(route(ids, shape.E), weights, shape.E // num_ranks, num_ranks, transport)
    assert planned.num_dropped == 0
    rows = planned.rows_per_rank
    if isinstance(transport, Capacity):
        rows = torch.full((num_ranks,), transport.rows)
    node = min(8, num_ranks)
    a_row = costs.row_bytes(shape, 2, deduplicate)
    links = costs.Links(8, 1e9, 1e8, 1e-5, 1e-6, 1e12)
    pair = costs.costs(shape, num_ranks, transport, links)
    for cost, num_bytes in zip(pair, (a_row.forward, a_row.backward)):
        assert cost.inside == pytest.approx(int(rows[1:node].sum()) * num_bytes, rel=0.03)
        assert cost.across == pytest.approx(int(rows[node:].sum()) * num_bytes, rel=0.03)


def test_cost_grows_with_bytes_and_with_the_fullest_rank() -> None:
    shape, links = Shape("", 64, 4, 16, 256, 64), costs.Links(8, 1e9, 1e8, 1e-5, 1e-6, 1e12)
    for transport in (AllToAll(), AllToAll(deduplicate=True), Capacity(200)):
        inside, _ = costs.costs(shape, 8, transport, links)
        across, _ = costs.costs(shape, 16, transport, links)
        assert inside.across == 0 and across.across > 0
        assert across.seconds > inside.seconds
        uneven, _ = costs.costs(shape, 8, transport, links, imbalance=2.0)
        assert (uneven.seconds > inside.seconds) == isinstance(transport, AllToAll)
    assert costs.efficiency(1.0, 0.0, 2.0) == 0.5


def test_a_line_is_found_again() -> None:
    latency, rate = costs.fit([(x, 1e-3 + x / 2e9) for x in (1e3, 1e6, 1e9)])
    assert abs(latency - 1e-3) < 1e-9 and abs(rate - 2e9) < 1e3
