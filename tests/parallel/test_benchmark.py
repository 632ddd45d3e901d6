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
from tokenyard.parallel import AllToAll, Capacity

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_it_checks_then_times(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--tiny", "--tokens", "48", "--repeats", "1", "--json", str(file)]
    cases = ["--cases", "sweep", "exchange", "layer"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*run, "-m", "benchmarks.parallel", *options, *cases],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["num_ranks"] == 2 and result["backend"] == "gloo"
    rows = result["results"]
    assert [row["case"] for row in rows[:3]] == ["check", "check", "sweep"]
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
