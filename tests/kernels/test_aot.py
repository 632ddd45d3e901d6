"""Every kernel, compiled ahead of time for GPUs that need not be here: resources and instructions."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels.aot import SHARED_LIMIT, TARGETS

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("aot.py")
WIDE = "7168"
MOVES = {"_permute_kernel", "_combine_kernel", "_sort_chunks_kernel", "_backward_kernel"}

GEMMS = {"_direct_kernel", "_grouped_gemm_kernel", "_weight_gradient_kernel"}
EXPERTS = {"_up_kernel", "_up_direct_kernel", "_slopes_kernel", "_weights_gradient_kernel"}

HOPPER = {"multiply_kernel", "weight_gradient_kernel"}

Report = dict[str, Any]


def compile_for(target: str, cache: Path) -> list[Report]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, target],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def described(reports: list[Report], faulty: Callable[[Report], bool]) -> list[str]:
    """The faulty ones in short, so that a failure reads well."""
    return [
        f"{r['kernel']} shared={r['shared']} registers={r['registers']} spills={r['spills']} "
        f"fused={r['fused']} loads={r['loads']} stores={r['stores']} {r['constants']}"
        for r in reports
        if faulty(r)
    ]


# One to five minutes each. Often run the one with kernels of its own, the least shared memory, and AMD.
OFTEN = {"sm_90", "sm_120", "gfx942"}
ALL = [
    pytest.param(target, marks=[] if target in OFTEN else pytest.mark.slow) for target in TARGETS
]


# All checks of a target share its compilation, so they are one test.
@pytest.mark.parametrize("target", ALL)
def test_kernels_fit_the_device(target: str, tmp_path: Path) -> None:
    reports = compile_for(target, tmp_path)
    kernels = {report["kernel"] for report in reports}
    assert kernels >= {*MOVES, *GEMMS, *EXPERTS, "_place_kernel", "_topk_kernel"}

    if target == "sm_90":
        assert kernels >= HOPPER

    limit = SHARED_LIMIT[target]
    failures = {
        f"more than {limit} bytes of shared memory": described(
            reports, lambda r: r["shared"] > limit
        ),
        "MMAs that ptxas serializes": described(reports, lambda r: bool(r.get("serialized"))),
        "registers spilled to memory": described(reports, lambda r: r["spills"] > 0),
    }

    wide = [r for r in reports if r["constants"].get("NUM_COLUMNS") == WIDE]
    assert {r["kernel"] for r in wide} >= MOVES
    if target.startswith("sm_"):
        failures["rows loaded in parts of less than 16 bytes"] = described(
            wide, lambda r: not {".v4.b32", ".v2.b64", "async 16"} & set(r["loads"])
        )
        failures["rows stored in parts of less than 16 bytes"] = described(
            [r for r in wide if r["kernel"] != "_backward_kernel"],  # it stores single weights too
            lambda r: not set(r["stores"]) <= {".v4.b32", ".v2.b64"},
        )

    sums = [r for r in reports if r["kernel"] == "_combine_kernel"]
    fused = [r for r in sums if r["constants"]["FMA_BF16"] == "True"]
    assert 0 < len(fused) < len(sums)
    failures["a product and a sum that are rounded as one"] = described(
        sums, lambda r: r["fused"] > 0 and r not in fused
    )
    failures["no fused multiply-add where one is promised"] = described(
        fused, lambda r: r["fused"] == 0
    )
    found = {fault: kernels for fault, kernels in failures.items() if kernels}
    if found:
        pytest.fail(f"{target}: {json.dumps(found, indent=1)}", pytrace=False)
