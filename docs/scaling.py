"""The tables of docs/scaling.md: expected bytes and times, and how far these are from measured ones.

python docs/scaling.py    write them into the document
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from benchmarks import costs  # noqa: E402
from benchmarks.shapes import SHAPES, Shape  # noqa: E402
from tokenyard.parallel import AllToAll, Capacity  # noqa: E402
from tokenyard.parallel.transports import Transport  # noqa: E402

ASSUMED = costs.Links(
    node=8, inside=400e9, across=50e9, start=20e-6, message=0.5e-6, memory=4.27e12
)
ROOM = 1.25
SPREAD = {"qwen3-30b-a3b": (8, 64, 128), "deepseek-v3": (8, 64, 256)}
"""Ranks that experts are spread over; of 512 no more than there are experts."""
TOKENS = 8192


def transports(shape: Shape, num_ranks: int) -> dict[str, Transport]:
    return {
        "a row a choice": AllToAll(),
        f"the same, capacity {ROOM}": costs.capacity(shape, num_ranks, ROOM),
        "a row a rank": AllToAll(deduplicate=True),
    }


def layer_flops(name: str) -> float:
    """Of one GPU alone, forward and backward, as measured."""
    rows = json.loads((RESULTS / "moe_layer_h200.json").read_text())["results"]
    found = {(row["operator"], row["shape"]): row["teraflops_per_second"] for row in rows}
    return found["layer forward + backward", name] * 1e12


def expected() -> Iterator[str]:
    yield (
        "| shape | ranks | rows | MB a rank in the node, across | messages | exchange, ms "
        "| experts, ms | efficiency | the same, a rank 1.5 times as full |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, sizes in SPREAD.items():
        shape = replace(SHAPES[name], T=TOKENS)
        alone = costs.experts_seconds(shape, layer_flops(name))
        for num_ranks in sizes:
            for way, transport in transports(shape, num_ranks).items():
                pair = costs.costs(shape, num_ranks, transport, ASSUMED)
                uneven = costs.costs(shape, num_ranks, transport, ASSUMED, imbalance=1.5)
                inside, across = (sum(getattr(c, k) for c in pair) for k in ("inside", "across"))
                seconds = sum(cost.seconds for cost in pair)
                share = costs.efficiency(alone, seconds)
                worse = costs.efficiency(alone, sum(c.seconds for c in uneven), 1.5)
                yield (
                    f"| {name} | {num_ranks} | {way} | {inside / 1e6:.0f}, {across / 1e6:.0f} | "
                    f"{sum(cost.messages for cost in pair)} | {seconds * 1e3:.1f} | "
                    f"{alone * 1e3:.1f} | {share:.2f} | {worse:.2f} |"
                )


def _transport(text: str) -> Transport:
    """Of its repr."""
    once = "deduplicate=True" in text
    if text.startswith("AllToAll"):
        return AllToAll(once)
    return Capacity(int(text.split("rows=")[1].split(",")[0]), deduplicate=once)


def measured() -> Iterator[str]:
    result = json.loads((RESULTS / "parallel_cpu.json").read_text())
    rows: list[dict[str, Any]] = result["results"]
    (sweep,) = (row for row in rows if row["case"] == "sweep")
    points = [(each["bytes_a_rank"], each["milliseconds"] / 1e3) for each in sweep["points"]]
    latency, rate = costs.fit(points)
    links = costs.Links(
        2, rate, rate, start=latency, message=0.0, memory=sweep["copy_gigabytes_per_second"] * 1e9
    )
    yield (
        f"The raw exchange fits {latency * 1e3:.2f} ms + bytes / ({rate / 1e9:.2f} GB/s); a copy moves "
        f"{links.memory / 1e9:.1f} GB/s."
    )
    yield ""
    yield (
        "| T | transport | MB sent: formula, measured | error | exchange, ms: formula, measured | error "
        "| dispatch + combine, ms: formula, measured | error |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row["case"] != "exchange":
            continue
        sizes = result["shapes"][row["shape"]]
        shape = Shape(row["shape"], row["tokens"], sizes["K"], sizes["E"], sizes["H"], sizes["I"])
        transport = _transport(row["transport"])
        pair = costs.costs(shape, result["num_ranks"], transport, links, row["element_bytes"])
        pairs = (
            (sum(row["expected_bytes"].values()) / 1e6, sum(row["sent_bytes"].values()) / 1e6),
            (sum(c.exchange for c in pair) * 1e3, row["milliseconds"]["exchange_both"]),
            (sum(c.seconds for c in pair) * 1e3, row["milliseconds"]["both"]),
        )
        cells = (f"{a:.2f}, {b:.2f} | {(a - b) / b:+.0%}" for a, b in pairs)
        yield f"| {shape.T} | `{row['transport']}` | " + " | ".join(cells) + " |"


PARTS = {"expected": expected, "measured": measured}


def document(text: str) -> str:
    for name, lines in PARTS.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(start)
        text = before + start + "\n" + "\n".join(lines()) + "\n\n" + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
