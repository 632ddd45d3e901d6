"""Check, then time, the operators on a GPU, beside the peers that are installed.

python -m benchmarks.run [OPERATOR ...] [--shapes NAME ...] [--peers] [--json FILE]
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import grouped_gemm, layer_peers, measure, moe_layer, peers, permutation
from benchmarks.case import Case
from benchmarks.shapes import LAYERS, SHAPES, SINGLE, Shape

GIB = 2**30


OPERATORS = permutation.OPERATORS | grouped_gemm.OPERATORS | moe_layer.OPERATORS
SHORT = {"route", "topk"}
"""So short that launching decides the time of an eager call: the kernels alone are timed too."""


def timed(case: Case, rate: float, with_peers: bool) -> dict[str, Any]:
    """Check a case, then time it. Shares are of the time that a copy would take to move the same bytes:

    at the rate of a large copy, and at that of a copy of this very size.
    """
    case.check()
    functions = {"ours": case.run} | (case.peers if with_peers else {})
    turn = case.repeat // 2, case.repeat
    times = measure.gpu_milliseconds_in_turns(functions, case.rounds, *turn)
    milliseconds = times.pop("ours")
    row: dict[str, Any] = {"milliseconds": milliseconds}
    if case.num_bytes:
        row["terabytes_per_second"] = case.num_bytes / milliseconds / 1e9
        row["share_of_large_copy"] = case.num_bytes / rate / milliseconds
        same_size = measure.copy_rate(case.num_bytes)
        row["share_of_same_size_copy"] = case.num_bytes / same_size / milliseconds
        fill = measure.fill_rate(case.written)
        row["share_of_filling_the_output"] = case.written / fill / milliseconds
    if case.num_flops:
        row["teraflops_per_second"] = case.num_flops / milliseconds / 1e9
    if times:
        row["peers"] = {
            name: {"milliseconds": theirs, "ratio": theirs / milliseconds}
            for name, theirs in times.items()
        }
        if case.num_flops:
            for peer in row["peers"].values():
                peer["teraflops_per_second"] = case.num_flops / peer["milliseconds"] / 1e9
    return row | case.facts


def table_of(results: dict[tuple[str, str], dict[str, Any]]) -> Table:
    table = Table(title="GPU, medians; shares of a large copy, a copy of the same size, a fill")
    for title in ("operator", "shape", "ms", "kernels us", "rate", "shares", "peers: time / ours"):
        table.add_column(title, justify="left" if title[0] in "os" else "right")
    for (operator, shape), row in results.items():
        shares = [
            f"{row[key]:.3f}"
            for key in (
                "share_of_large_copy",
                "share_of_same_size_copy",
                "share_of_filling_the_output",
            )
            if key in row
        ]
        others = [f"{name} {peer['ratio']:.2f}" for name, peer in row.get("peers", {}).items()]
        rate = f"{row['terabytes_per_second']:.2f} TB/s" if "terabytes_per_second" in row else ""
        if "teraflops_per_second" in row:
            rate = f"{row['teraflops_per_second']:.0f} TFLOP/s"
        table.add_row(
            operator,
            shape,
            f"{row['milliseconds']:.4f}",
            f"{row['kernel_microseconds']:.1f}" if "kernel_microseconds" in row else "",
            rate,
            " ".join(shares),
            ", ".join(others),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), help="default: those of the operator"
    )
    parser.add_argument("--peers", action="store_true", help="time installed peers too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    unknown = set(options.operators) - set(OPERATORS)
    if unknown:
        parser.error(f"unknown operator {', '.join(sorted(unknown))}; there are "
                     + ", ".join(OPERATORS))  # fmt: skip
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; python -m benchmarks.expert_mlp_cpu runs without one")

    torch.manual_seed(0)
    rate, fill = measure.copy_rate(4 * GIB), measure.fill_rate(2 * GIB)
    console = Console(width=150)
    console.print(f"large copy {rate / 1e9:.2f} TB/s, large fill {fill / 1e9:.2f} TB/s")
    chosen = options.operators or list(OPERATORS)

    def cases(operators: list[str]) -> Iterator[tuple[Case, Shape]]:
        for operator in operators:
            make: Callable[[Shape], Iterator[Case]] = OPERATORS[operator]
            usual: tuple[str, ...] = SINGLE
            if operator == "moe_layer":
                make, usual = partial(moe_layer.moe_layer, with_peers=options.peers), LAYERS
            for shape in (SHAPES[name] for name in options.shapes or usual):
                for case in make(shape):
                    yield case, shape
                    torch.cuda.empty_cache()

    packages = ["triton", *(["moe-ops"] if peers.moe_ops() else [])]
    if "moe_layer" in chosen and options.peers:
        packages += layer_peers.PACKAGES
    record = measure.environment("cuda", *packages)
    record |= {
        "peers": list(peers.installed()) if options.peers else [],
        "copy_terabytes_per_second": rate / 1e9,
        "fill_terabytes_per_second": fill / 1e9,
    }
    if permutation.OPERATORS.keys() <= set(chosen):
        record["host_microseconds"] = permutation.host()
        record["decode_microseconds"] = permutation.decode()
    if "grouped_gemm" in chosen:
        record["grouped_gemm_decode"] = grouped_gemm.decode()
    results: dict[tuple[str, str], dict[str, Any]] = {}

    def save() -> None:
        """After every case: a run that is cut short keeps what it measured."""
        rows = [{"operator": name, "shape": shape} | row for (name, shape), row in results.items()]
        if options.json:
            measure.write_result(options.json, record | {"results": rows})

    for case, shape in cases(chosen):
        results[case.name, shape.name] = timed(case, rate, options.peers)
        save()
    # last, since launches stay slower once a profiler has been attached
    for case, shape in cases([operator for operator in chosen if operator in SHORT]):
        row = results[case.name, shape.name]
        row["kernel_microseconds"] = measure.kernel_microseconds(case.run)
        save()
    if "moe_layer" in chosen:
        record["moe_layer_decode"] = moe_layer.decode(options.shapes or LAYERS, options.peers)
        save()
    console.print({key: value for key, value in record.items() if isinstance(value, dict)})
    console.print(table_of(results))
    if "moe_layer" in chosen:
        console.print(moe_layer.table_of(results))


if __name__ == "__main__":
    main()
