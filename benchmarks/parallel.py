"""Check, then time, expert parallelism over any number of ranks.

torchrun --nproc-per-node N -m benchmarks.parallel [--shapes NAME ...] [--tokens T ...] [--json FILE]
torchrun --nproc-per-node 2 -m benchmarks.parallel --tiny    on the CPU
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import measure, parallel_cases, parallel_checks
from benchmarks.parallel_cases import Row, cleaned
from benchmarks.ranks import Ranks
from benchmarks.shapes import SHAPES, Shape
from tokenyard.parallel import fail_together

TINY = Shape("tiny", T=64, K=4, E=16, H=256, I=64)
TIMED = {
    "exchange": parallel_cases.exchange,
    "layer": parallel_cases.layer,
    "routings": parallel_cases.routings,
    "graph": parallel_cases.graph,  # last: little works after a capture that failed
}
CASES = ("sweep", "mesh", *TIMED)


def rows_of(
    ranks: Ranks, shapes: list[Shape], tokens: list[int], cases: list[str]
) -> Iterator[Row]:
    """Every shape is checked before anything is timed."""
    dtypes = [torch.bfloat16] if ranks.on_gpu else [torch.float32, torch.bfloat16]
    for shape in shapes:
        for dtype in dtypes:
            found = parallel_checks.check_layer(ranks, replace(shape, T=max(tokens)), dtype)
            yield {"case": "check", "shape": shape.name} | found
    if "mesh" in cases:
        for mesh in parallel_checks.meshes(ranks.size):
            yield {"case": "mesh"} | parallel_checks.check_mesh(ranks, mesh)
    if "sweep" in cases:
        yield from ({"case": "sweep"} | row for row in parallel_cases.sweep(ranks))
    for case, timed in TIMED.items():
        for shape in shapes if case in cases else []:
            for count in tokens:
                head = {"case": case, "shape": shape.name, "tokens": count}
                yield from (head | row for row in timed(ranks, replace(shape, T=count)))


def joined(timeout: timedelta, repeats: int | None) -> Ranks:
    """This process as torchrun started it, one GPU for each where there are any."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
    return Ranks(rank, size, device, repeats or (25 if device.type == "cuda" else 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES,
                        default=["qwen3-30b-a3b", "deepseek-v3"])  # fmt: skip
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T", help="of each rank")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--tiny", action="store_true", help="one small shape, also on the CPU")
    parser.add_argument("--repeats", type=int, help="calls of which the median is taken")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS",
                        help="that a rank waits for the others")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node N -m benchmarks.parallel")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.tiny:
        parser.error("needs a CUDA GPU for each rank; with --tiny it runs without")
    if on_gpu and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        parser.error(f"needs a GPU for each rank; there are {torch.cuda.device_count()}")

    shapes = [TINY] if options.tiny else [SHAPES[name] for name in options.shapes]
    tokens = options.tokens or ([TINY.T] if options.tiny else [1024, 8192])
    ranks = joined(timedelta(seconds=options.timeout), options.repeats)
    record = measure.environment(ranks.device.type, *(["triton"] if on_gpu else []))
    record |= {
        "num_ranks": ranks.size,
        "backend": dist.get_backend(),
        "repeats": ranks.repeats,
        "shapes": {shape.name: {key: vars(shape)[key] for key in "KEHI"} for shape in shapes},
    }
    results: list[Row] = []
    with fail_together(timeout=options.timeout):
        for row in cleaned(rows_of(ranks, shapes, tokens, options.cases), ranks):
            results.append(row)
            if ranks.rank == 0:
                print(*(f"{key} {value}" for key, value in row.items()), sep=", ", flush=True)
                if options.json:
                    measure.write_result(options.json, record | {"results": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
