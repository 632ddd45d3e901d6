"""Bytes and time of expert parallelism as formulas; docs/scaling.md explains their terms.

Routing is uniform: every token has K distinct choices of E experts, all sets equally likely.
"""

from dataclasses import dataclass
from math import ceil, comb

from benchmarks.shapes import Shape
from tokenyard.parallel import Capacity
from tokenyard.parallel.transports import Transport

CHOICE = 4 + 4
"""Bytes of an id and a weight in fp32."""

WEIGHT = 4
COLLECTIVES = {"forward": 3, "backward": 3}
"""Rows, choices, results; their gradients. `AllToAll` exchanges counts before."""


def distinct_ranks(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Expected number of ranks among a token's choices.

    A rank of n experts is none of them with probability C(E - n, K) / C(E, K).
    """
    most = ceil(num_experts / num_ranks)
    sizes = [most] * (num_ranks - 1) + [num_experts - most * (num_ranks - 1)]
    ways = comb(num_experts, top_k)
    return sum(1 - comb(num_experts - n, top_k) / ways for n in sizes)


def rows_sent(shape: Shape, num_ranks: int, transport: Transport) -> float:
    """Expected rows that a rank sends, those to itself included."""
    if isinstance(transport, Capacity):
        return num_ranks * transport.rows
    if transport.deduplicate:
        return shape.T * distinct_ranks(shape.E, shape.K, num_ranks)
    return shape.T * shape.K


def capacity(shape: Shape, num_ranks: int, factor: float, deduplicate: bool = False) -> Capacity:
    """With room for `factor` times the mean number of rows for a rank."""
    a_token = distinct_ranks(shape.E, shape.K, num_ranks) if deduplicate else shape.K
    return Capacity(ceil(factor * shape.T * a_token / num_ranks), deduplicate=deduplicate)


@dataclass(frozen=True)
class RowBytes:
    """What goes with every row, in each of the four directions."""

    dispatch: int
    combine: int
    combine_gradient: int
    dispatch_gradient: int

    @property
    def forward(self) -> int:
        return self.dispatch + self.combine

    @property
    def backward(self) -> int:
        return self.combine_gradient + self.dispatch_gradient


def row_bytes(shape: Shape, element: int, deduplicate: bool) -> RowBytes:
    """`element` bytes of H numbers; partial sums of a rank come back in fp32."""
    choices = shape.K if deduplicate else 1
    row = shape.H * element
    partial = shape.H * max(element, 4) if deduplicate else row
    return RowBytes(row + choices * CHOICE, partial, row, row + choices * WEIGHT)


@dataclass(frozen=True)
class Links:
    """Of a rank: bytes a second each way inside its node of `node` ranks and across nodes; seconds.

    start      of a collective
    message    of a collective for every other rank
    memory     bytes a second that a copy reads and writes
    """

    node: int
    inside: float
    across: float
    start: float
    message: float
    memory: float


@dataclass(frozen=True)
class Cost:
    """Of one direction, forward or backward, of one rank."""

    inside: float
    across: float
    collectives: int
    messages: int
    exchange: float
    local: float

    @property
    def seconds(self) -> float:
        return self.exchange + self.local


def costs(
    shape: Shape,
    num_ranks: int,
    transport: Transport,
    links: Links,
    element: int = 2,
    imbalance: float = 1.0,
) -> tuple[Cost, Cost]:
    """Of dispatch and combine, forward and backward.

    imbalance   rows of the rank that gets most over the mean: it receives so many times the bytes.
                Capacity sends the same whatever the routing
    """
    node = min(links.node, num_ranks)
    rows = rows_sent(shape, num_ranks, transport)
    a_row = row_bytes(shape, element, transport.deduplicate)
    counts = 0 if isinstance(transport, Capacity) else 1
    fullest = 1.0 if isinstance(transport, Capacity) else imbalance
    both = shape.T * shape.H * element
    parts = (
        (
            a_row.forward,
            COLLECTIVES["forward"] + counts,
            rows * (a_row.combine + shape.H * element),
        ),
        (a_row.backward, COLLECTIVES["backward"], 2 * rows * shape.H * element),
    )

    def cost(num_bytes: int, collectives: int, moved: float) -> Cost:
        inside = rows * num_bytes * (node - 1) / num_ranks
        across = rows * num_bytes * (num_ranks - node) / num_ranks
        wire = max(inside / links.inside, across / links.across) * fullest
        waiting = collectives * (links.start + (num_ranks - 1) * links.message)
        return Cost(
            inside=inside,
            across=across,
            collectives=collectives,
            messages=collectives * (num_ranks - 1),
            exchange=waiting + wire,
            local=(2 * both + moved) / links.memory,
        )

    forward, backward = (cost(*part) for part in parts)
    return forward, backward


def experts_seconds(shape: Shape, flops: float) -> float:
    """Forward and backward of a layer of T tokens that runs at `flops` FLOP/s."""
    return 18 * shape.T * shape.K * shape.H * shape.I / flops


def efficiency(alone: float, exchange: float, imbalance: float = 1.0) -> float:
    """Time of one rank alone, with all experts, over that of a rank among others, nothing overlapped."""
    return alone / (imbalance * alone + exchange)


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(latency, bytes a second) of seconds = latency + bytes / rate: least squares of relative errors."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points)) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points))
    slope = covariance / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    return mean_y - slope * mean_x, 1 / slope
