"""What is timed of expert parallelism. Each function yields rows of the result file."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import costs
from benchmarks.parallel_checks import made, parameters_of
from benchmarks.ranks import Ranks
from benchmarks.shapes import Shape
from tokenyard.nn import MoE
from tokenyard.parallel import AllToAll, Capacity, Dispatched, ExpertParallel, combine, dispatch
from tokenyard.parallel.exchange import exchange_choices, exchange_rows
from tokenyard.parallel.failures import read
from tokenyard.parallel.transports import Transport

Row = dict[str, Any]
ROOM = 1.25
"""Rows of `Capacity` over the mean."""


def choices(ranks: Ranks, shape: Shape, kind: str = "uniform", number: int = 2) -> Tensor:
    """[T,K] of this rank. "zipf": expert e has 1 / (e + 1) the weight of the first in every draw.

    "first experts": 0 to K - 1 for every token, all on one rank unless a rank has fewer than K.
    """
    if kind == "first experts":
        return torch.arange(shape.K, device=ranks.device).repeat(shape.T, 1)
    ranks.seed(number, ranks.rank)
    scores = -torch.empty(shape.T, shape.E, device=ranks.device).exponential_().log()
    if kind == "zipf":
        scores -= torch.arange(1, shape.E + 1, device=ranks.device).log()
    return scores.topk(shape.K).indices


def transports(ranks: Ranks, shape: Shape, ids: Tensor) -> list[Transport]:
    """Capacity with room for 1.25 times the mean, or more where the routing needs it."""
    found: list[Transport] = []
    of = ids // -(-shape.E // ranks.size)
    chosen = torch.nn.functional.one_hot(of, ranks.size).sum(1)
    for deduplicate in (False, True):
        needed = (chosen.clamp(max=1) if deduplicate else chosen).sum(0).max()
        usual = costs.capacity(shape, ranks.size, ROOM, deduplicate).rows
        rows = max(usual, round(ranks.most(float(needed))))
        found += [AllToAll(deduplicate), Capacity(rows, deduplicate=deduplicate)]
    return found


def sweep(ranks: Ranks) -> Iterator[Row]:
    """torch's exchange by the bytes for each rank, and a copy: what predictions start from."""
    points = []
    for power in range(10, 28 if ranks.on_gpu else 25, 2):
        buffer = torch.zeros(ranks.size, 2**power // 4, dtype=torch.int32, device=ranks.device)
        into = torch.empty_like(buffer)
        call = partial(dist.all_to_all_single, into, buffer)
        milliseconds = ranks.milliseconds({"raw": call})["raw"]
        points.append({"bytes_a_rank": 2**power, "milliseconds": milliseconds})
    copied = ranks.milliseconds({"copy": partial(into.copy_, buffer)})["copy"]
    yield {"points": points, "copy_gigabytes_per_second": 2 * buffer.nbytes / copied / 1e6}


class Exchange:
    """dispatch and combine of one rank, around nothing; and the same bytes by torch alone."""

    def __init__(self, ranks: Ranks, shape: Shape, ids: Tensor, transport: Transport) -> None:
        self.ranks, self.shape, self.transport, self.ids = ranks, shape, transport, ids
        ranks.seed(4, ranks.rank)
        self.x = ranks.randn(shape.T, shape.H).requires_grad_()
        self.weights = torch.rand(shape.T, shape.K, device=ranks.device).requires_grad_()
        first = self.dispatched()
        assert not first.num_dropped
        once = transport.deduplicate
        partial_sums = torch.float32 if once else ranks.dtype
        self.out = ranks.randn(*first.x.shape, dtype=partial_sums).requires_grad_()
        self.grads = (
            ranks.randn(shape.T, shape.H),
            ranks.randn(*first.x.shape),
            torch.rand_like(first.topk_weights),
        )
        self.send, self.receive = first.journey.send, first.journey.receive
        self.bytes = costs.row_bytes(shape, self.x.element_size(), once)
        assert first.bytes_sent == (sum(self.send) - self.send[ranks.rank]) * self.bytes.dispatch

    def dispatched(self) -> Dispatched:
        return dispatch(
            self.x,
            self.ids,
            self.weights,
            num_global_experts=self.shape.E,
            transport=self.transport,
            weights_at="expert" if self.transport.deduplicate else "later",
        )

    def forward(self) -> tuple[Tensor, Dispatched]:
        sent = self.dispatched()
        return combine(self.out, sent), sent

    def both(self) -> None:
        total, sent = self.forward()
        outputs = total, sent.x, sent.topk_weights
        torch.autograd.grad(outputs, (self.x, self.weights, self.out), self.grads)

    def sent_bytes(self) -> dict[str, float]:
        """That leave a rank for others, the mean."""
        mine = self.ranks.rank
        there = sum(self.send) - self.send[mine]
        back = sum(self.receive) - self.receive[mine]
        sent = there * self.bytes.dispatch + back * self.bytes.combine
        gradients = there * self.bytes.combine_gradient + back * self.bytes.dispatch_gradient
        return {"forward": self.ranks.mean(sent), "backward": self.ranks.mean(gradients)}

    def raw(self, backward: bool) -> Callable[[], None]:
        """One `all_to_all_single` for each direction."""
        ways = [(self.send, self.receive, self.bytes.dispatch),
                (self.receive, self.send, self.bytes.combine)]  # fmt: skip
        if backward:
            ways += [(self.send, self.receive, self.bytes.combine_gradient),
                     (self.receive, self.send, self.bytes.dispatch_gradient)]  # fmt: skip

        def rows(count: int, num_bytes: int) -> Tensor:
            sizes = count, num_bytes // 4
            return torch.zeros(sizes, dtype=torch.int32, device=self.ranks.device)

        calls = [
            (rows(sum(into), size), rows(sum(out), size), into, out) for out, into, size in ways
        ]

        def run() -> None:
            for call in calls:
                dist.all_to_all_single(*call)

        return run

    def alone(self, backward: bool) -> Callable[[], None]:
        """Our own messages without plan, permutation and sum."""
        there = self.send, self.receive, self.ranks.group.group_name
        back = self.receive, self.send, self.ranks.group.group_name
        width = self.shape.K if self.transport.deduplicate else 1
        device, count = self.ranks.device, sum(self.send)
        rows = self.x.detach().new_zeros(count, self.shape.H)
        out, gradient = self.out.detach(), self.grads[1]
        weights = torch.ones(count, width, device=device)
        ids = weights.int()
        d_weights = torch.ones(sum(self.receive), width, device=device)
        counts = torch.ones(self.ranks.size, 7, dtype=torch.int64, device=device)
        ones = [1] * self.ranks.size

        def run() -> None:
            if isinstance(self.transport, AllToAll):
                read(self.ranks.group, exchange_rows(counts, ones, ones, there[2]))
            exchange_rows(rows, *there)
            exchange_choices(weights, ids, *there)
            exchange_rows(out, *back)
            if backward:
                exchange_rows(rows, *there)
                exchange_rows(gradient, *back)
                exchange_rows(d_weights, *back)

        return run


def exchange(ranks: Ranks, shape: Shape) -> Iterator[Row]:
    """dispatch and combine against torch's exchange of the same bytes."""
    ids = choices(ranks, shape)
    for transport in transports(ranks, shape, ids):
        it = Exchange(ranks, shape, ids, transport)
        times = ranks.milliseconds(
            {
                "forward": it.forward,
                "both": it.both,
                "exchange_forward": it.alone(False),
                "exchange_both": it.alone(True),
                "raw_forward": it.raw(False),
                "raw_both": it.raw(True),
            }
        )
        sent = it.sent_bytes()
        rows = costs.rows_sent(shape, ranks.size, transport)
        elsewhere = rows * (ranks.size - 1) / ranks.size
        total = {"forward": sent["forward"], "both": sent["forward"] + sent["backward"]}
        yield {
            "transport": str(transport),
            "element_bytes": it.x.element_size(),
            "sent_bytes": sent,
            "expected_bytes": {
                "forward": elsewhere * it.bytes.forward,
                "backward": elsewhere * it.bytes.backward,
            },
            "rows_over_choices": ranks.mean(sum(it.send)) / (shape.T * shape.K),
            "expected_rows_over_choices": rows / (shape.T * shape.K),
            "milliseconds": times,
            "raw_over_ours": {way: times[f"raw_{way}"] / times[way] for way in total},
            "raw_over_our_exchange": {
                way: times[f"raw_{way}"] / times[f"exchange_{way}"] for way in total
            },
            "gigabytes_per_second": {way: total[way] / times[way] / 1e6 for way in total},
            "raw_gigabytes_per_second": {
                way: total[way] / times[f"raw_{way}"] / 1e6 for way in total
            },
        }


class Layer:
    """Calls of `nn.MoE` with choices that are given."""

    def __init__(self, ranks: Ranks, shape: Shape, moe: MoE, ids: Tensor) -> None:
        ranks.seed(5, ranks.rank)
        self.moe, self.ids = moe, ids
        self.x = ranks.randn(shape.T, shape.H).requires_grad_()
        self.d_out = ranks.randn(shape.T, shape.H)

    def forward(self) -> Tensor:
        return self.moe(self.x, self.ids)[0]

    def both(self) -> tuple[Tensor, ...]:
        out = self.forward()
        leaves = self.x, *parameters_of(self.moe)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out)

    def calls(self) -> dict[str, Callable[[], object]]:
        return {"forward": self.forward, "both": self.both}


def spread(ranks: Ranks, moe: MoE, transport: Transport | None = None) -> MoE:
    """The same with its experts over all ranks."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("ep",))
    style = ExpertParallel(transport=transport)
    parallelize_module(moe, mesh, style)
    return moe


def fits(ranks: Ranks, shape: Shape) -> bool:
    """All experts with their gradients, and what a layer of T tokens uses, in the memory left."""
    if not ranks.on_gpu:
        return True
    needed = 4 * shape.E * 3 * shape.H * shape.I + 16 * shape.T * shape.K * (shape.H + 2 * shape.I)
    return bool(needed < ranks.numbers([torch.cuda.mem_get_info()[0]], dist.ReduceOp.MIN)[0])


def layer(ranks: Ranks, shape: Shape) -> Iterator[Row]:
    """Forward and backward, T tokens on each rank, beside one rank alone with all experts."""
    ids = choices(ranks, shape)
    moe = made(ranks, shape, ranks.dtype)
    single: dict[int, dict[str, float]] = {}
    for num_tokens in sorted({shape.T, shape.T // ranks.size}, reverse=True):
        if fits(ranks, shape):
            fewer = Shape(shape.name, num_tokens, shape.K, shape.E, shape.H, shape.I)
            calls = Layer(ranks, fewer, moe, ids[:num_tokens]).calls()
            single[num_tokens] = ranks.milliseconds(calls, own=True)
            yield {"transport": "one rank alone", "alone_tokens": num_tokens,
                   "milliseconds": single[num_tokens]}  # fmt: skip
    spread(ranks, moe)
    for transport in transports(ranks, shape, ids):
        moe.dispatcher.transport = transport  # type: ignore[attr-defined]
        times = ranks.milliseconds(Layer(ranks, shape, moe, ids).calls())
        row: Row = {"transport": str(transport), "milliseconds": times}
        if shape.T in single:
            row["efficiency"] = {name: single[shape.T][name] / times[name] for name in times}
        flops = costs.experts_seconds(shape, 1.0)
        yield row | {"teraflops_per_second_a_rank": flops / times["both"] / 1e9}


def routings(ranks: Ranks, shape: Shape) -> Iterator[Row]:
    """Uneven routing: what is dropped, and the time, which is that of the fullest rank."""
    moe = spread(ranks, made(ranks, shape, ranks.dtype))
    for kind in ("uniform", "zipf", "first experts"):
        ids = choices(ranks, shape, kind)
        usual = costs.capacity(shape, ranks.size, ROOM)
        for transport in (AllToAll(), AllToAll(deduplicate=True), usual):
            moe.dispatcher.transport = transport  # type: ignore[attr-defined]
            it = Layer(ranks, shape, moe, ids)
            out, statistics = moe(it.x, ids)
            assert out.isfinite().all()
            loads = statistics.tokens_per_expert.double()
            dist.all_reduce(loads)
            parts = [float(part.sum()) for part in loads.chunk(ranks.size)]
            del out, statistics
            yield {
                "routing": kind,
                "transport": str(transport),
                "milliseconds": ranks.milliseconds(it.calls()),
                "dropped_share": 1 - sum(parts) / (ranks.size * shape.T * shape.K),
                "fullest_rank_over_mean": max(parts) * ranks.size / sum(parts),
            }


def graph(ranks: Ranks, shape: Shape) -> Iterator[Row]:
    """The layer with `Capacity` in a CUDA graph, replayed with another routing."""
    if not ranks.on_gpu:
        return
    routed = [choices(ranks, shape, number=number) for number in (2, 6)]
    rows = max(
        option.rows
        for ids in routed
        for option in transports(ranks, shape, ids)
        if isinstance(option, Capacity) and not option.deduplicate
    )
    moe = spread(ranks, made(ranks, shape, ranks.dtype), Capacity(rows))
    it = Layer(ranks, shape, moe, routed[0].clone())
    for name, call in it.calls().items():
        yield {"captured": name, "transport": str(Capacity(rows))} | _captured(
            ranks, it, call, routed[1]
        )


def _captured(ranks: Ranks, it: Layer, call: Callable[[], Any], other: Tensor) -> Row:
    """`call` replayed with the routing `other`, against an eager call."""
    recording = nullcontext() if call == it.both else torch.no_grad()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), recording:
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    # other threads, such as the one that watches over NCCL, may go on
    with recording, torch.cuda.graph(captured, capture_error_mode="thread_local"):
        results = call()
    it.ids.copy_(other)
    captured.replay()
    with recording:
        wants = call()
    pairs = zip(_list(results), _list(wants))
    ranks.agree([
        f"result {number} of a replay differs from the eager call"
        for number, (got, want) in enumerate(pairs)
        if not torch.equal(got, want)
    ])  # fmt: skip

    def eager() -> None:
        with recording:
            call()

    return {"milliseconds": ranks.milliseconds({"replay": captured.replay, "eager": eager})}


def _list(results: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    values = [results] if isinstance(results, Tensor) else results
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


def cleaned(rows: Iterator[Row], ranks: Ranks) -> Iterator[Row]:
    """Numbers with six digits; memory given back after each."""
    for row in rows:
        yield {key: rounded(value) for key, value in row.items()}
        gc.collect()
        if ranks.on_gpu:
            torch.cuda.empty_cache()


def rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
