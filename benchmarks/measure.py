"""What every benchmark shares: timing, the description of the machine, and result files."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def cpu_seconds(
    functions: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2
) -> dict[str, float]:
    """Median wall-clock seconds of each function, their calls taken in turn.

    Taking turns exposes all of them to the same disturbances of the machine.
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def gpu_milliseconds(function: Callable[[], object], warmup: int = 10, repeat: int = 25) -> float:
    """Median time of a call on the GPU between two events, the L2 cache flushed before each.

    Calls for `warmup` milliseconds, then for `repeat`.
    """
    from triton.testing import do_bench

    return float(do_bench(function, warmup=warmup, rep=repeat, return_mode="median"))


def gpu_milliseconds_in_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 3,
    warmup: int = 10,
    repeat: int = 25,
) -> dict[str, float]:
    """Median over the rounds of each function's median: a GPU that slows down slows all of them.

    Each round starts with another function, so that none always follows the same one.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(gpu_milliseconds(functions[name], warmup, repeat))
    return {name: statistics.median(measured) for name, measured in times.items()}


def kernel_microseconds(function: Callable[[], object], calls: int = 30) -> float:
    """Mean GPU time of a call's kernels, added up: without launch gaps, inputs left in the cache."""
    for _ in range(3):
        function()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / calls


def graph_microseconds(function: Callable[[], object], replays: int = 200) -> float:
    """Time of one replay of a call captured in a CUDA graph, replayed back to back."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(20):
        graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / replays * 1e3


def host_microseconds(function: Callable[[], object], calls: int = 300) -> float:
    """Mean host time of an asynchronous call, of small inputs."""
    for _ in range(50):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls * 1e6


@cache
def copy_rate(num_bytes: int) -> float:
    """Bytes per millisecond, read plus written, of a device copy that moves `num_bytes` in all."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return num_bytes / gpu_milliseconds(lambda: target.copy_(source))


@cache
def fill_rate(num_bytes: int) -> float:
    """Bytes per millisecond that a device fill of `num_bytes` writes."""
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / gpu_milliseconds(lambda: target.fill_(1))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| in fp64; NaN never passes a comparison."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-300))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Of the checkout, or as $TOKENYARD_COMMIT says where only a copy of it is."""
    if given := os.environ.get("TOKENYARD_COMMIT"):
        return given

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(device: str, *packages: str) -> dict[str, Any]:
    """Device, versions, commit and date, as every result file states them."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "versions": versions,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
