"""dispatch and combine on several processes against one process with the tokens of all."""

from collections.abc import Callable
from typing import Any

import torch
from cases import MOVED, assert_same_bits
from layers import Case, E, H, K, alone, differentiate, made, mine, together
from torch import Tensor
from world import World

import tokenyard
from tokenyard import RankTree, parallel
from tokenyard.compat import megatron
from tokenyard.conventions import to_inverse_map
from tokenyard.parallel import AllToAll, Capacity

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ROOM = Capacity(99)
ONCE = AllToAll(deduplicate=True), Capacity(99, deduplicate=True)


def close(got: Any, want: Any, dtype: torch.dtype = FP32) -> None:
    tolerance = 3e-2 if dtype == BF16 else 1e-5
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        scale = max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=tolerance, atol=tolerance)


def same_bits(got: Any, want: Any) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(ours, theirs)


def equals_one_process(world: World) -> None:
    for dtype in (FP32, BF16, FP64):
        case = made(world, dtype)
        want = mine(case, world, alone(case))
        for transport in (AllToAll(), ROOM):
            same_bits(together(case, world, transport, "later"), want)
            got = together(case, world, transport, "source")
            assert_same_bits(got[0], want[0])
            close(got, want, dtype)
            got = together(case, world, transport, "expert")
            close(got, want, dtype)
            same_bits(got[1:], want[1:])


def a_declared_rank_tree_has_the_same_bits_on_any_number_of_ranks(world: World) -> None:
    for dtype in (FP32, BF16):
        case, results = made(world, dtype), []
        for reduction in ("expert", RankTree(4), RankTree(4, "fp64", "fp64"), RankTree(2)):
            results.append(alone(case, reduction=reduction))
            want = mine(case, world, results[-1])
            same_bits(together(case, world, AllToAll(), "later", reduction), want)
        assert dtype != FP32 or not torch.equal(results[0][0], results[1][0])  # or it says nothing


def one_row_a_rank_is_the_rank_tree(world: World) -> None:
    """Partial sums made at the experts, in fp32 or bf16, then added up by rank; as Megatron-Core does."""
    for dtype in (FP32, BF16, FP64):
        case = made(world, dtype)
        for transport in ONCE:
            for within in ("fp32", "fp64", "fma_bf16"):
                if within == "fma_bf16" and dtype != BF16:
                    continue
                across: Any = "fp64" if within == "fp64" else "fp32"
                tree = RankTree(world.size, within, across)
                partial = RankTree(1, within, "none")
                want = mine(case, world, alone(case, reduction=tree))
                got = together(case, world, transport, "expert", tree, partial)
                assert_same_bits(got[0], want[0])
                close(got, want, dtype)
    case = made(world, BF16, choose=lambda ids: torch.rand(len(ids), E).argsort(1)[:, :K])
    assert_same_bits(
        together(
            case, world, AllToAll(deduplicate=True), "expert", None, RankTree(1, "fp32", "none")
        )[0],
        case.part(megatrons(case, world.size), world.rank),
    )


def megatrons(case: Case, ep_size: int) -> Tensor:
    """The output of one process, summed by the drop-in."""
    routing = tokenyard.route(case.topk_indices, E)
    ones = torch.ones(routing.num_rows, 1)
    rows = tokenyard.expert_mlp(
        tokenyard.permute(case.x, routing),
        tokenyard.route(routing.expert_of_row[:, None], E),
        ones,
        case.w_gate_up,
        case.w_down,
    )
    probs = torch.zeros(routing.num_tokens, E)
    probs.scatter_(1, case.topk_indices, case.topk_weights)
    return megatron.unpermute(
        rows,
        case.x.shape,
        probs=probs,
        num_experts=E,
        inverse_map=to_inverse_map(routing),
        ep_size=ep_size,
    )


def uneven_experts(world: World) -> None:
    case = made(world, num_experts=7)
    want = mine(case, world, alone(case))
    assert (
        len(case.experts(case.w_down, world))
        == ([4, 3] if world.size == 2 else [2, 2, 2, 1])[world.rank]
    )
    for transport in (AllToAll(), ROOM):
        same_bits(together(case, world, transport, "later"), want)
    for transport in ONCE:
        got = together(case, world, transport, "expert", None, RankTree(1, "fp32", "none"))
        close(got, want)


def every_kind_of_routing(world: World) -> None:
    """All to the first rank, all to one expert, nothing routed, no tokens anywhere."""
    per_rank = E // world.size
    routings: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
        "first rank": (lambda ids: ids.clamp(min=-1) % per_rank, (5, 0, 9, 4)),
        "one expert": (lambda ids: torch.full_like(ids, E - 1), (5, 0, 9, 4)),
        "nothing": (lambda ids: torch.full_like(ids, -1), (5, 0, 9, 4)),
        "one token": (lambda ids: ids, (0, 1, 0, 0)),
        "no tokens": (lambda ids: ids, (0, 0, 0, 0)),
    }
    for choose, tokens in routings.values():
        case = made(world, choose=choose, tokens=tokens)
        want = mine(case, world, alone(case))
        for transport in (AllToAll(), ROOM):
            same_bits(together(case, world, transport, "later"), want)
        for transport in ONCE:
            close(
                together(case, world, transport, "expert", None, RankTree(1, "fp32", "none")), want
            )


def received(case: Case, world: World, value: Tensor) -> list[Tensor]:
    """The rows of `value` that reach this rank, from plain loops: by sender, expert, slot."""
    per_rank, start, rows = -(-E // world.size), 0, []
    for count in case.tokens:
        for expert in range(world.rank * per_rank, (world.rank + 1) * per_rank):
            for t in range(start, start + count):
                rows += [value[t]] * case.topk_indices[t].tolist().count(expert)
        start += count
    return rows


def every_dtype_moves_bit_for_bit(world: World) -> None:
    """Scales travel beside fp8 bytes; strides and ranks do not matter."""
    case = made(world)
    for dtype in (*MOVED, torch.int16, torch.uint16, torch.float8_e5m2):
        x = (torch.randn(len(case.x), 2 * H) * 50).to(dtype)[:, ::2]
        scales = torch.rand(len(case.x), 3)
        numbers = torch.arange(len(case.x), dtype=torch.int16)
        sent = parallel.dispatch(
            case.part(x, world.rank),
            case.part(case.topk_indices, world.rank),
            case.part(case.topk_weights, world.rank),
            num_global_experts=E,
            extras=[case.part(value, world.rank) for value in (scales, numbers, scales[:, None])],
        )
        empty = x[:0]
        want = torch.stack([*received(case, world, x)] or [empty.new_empty(H)])[: len(sent.x)]
        assert_same_bits(sent.x, want.contiguous())
        for got, value in zip(sent.extras, (scales, numbers, scales[:, None])):
            rows = received(case, world, value)
            assert len(got) == len(rows)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, rows))
        assert sent.routing.validate().num_tokens == len(sent.x)


def kept_within(case: Case, world: World, capacity: Capacity) -> Tensor:
    """The choices [T,K] that find room, -1 for the others, from plain loops."""
    per_rank, start = E // world.size, 0
    kept = torch.where(case.topk_indices == E, -1, case.topk_indices)
    for count in case.tokens:
        for rank in range(world.size):
            waiting: dict[Any, float] = {}
            for t in range(start, start + count):
                for k, e in enumerate(kept[t].tolist()):
                    if e >= 0 and e // per_rank == rank:
                        key = (t,) if capacity.deduplicate else (t, k)
                        weight = case.topk_weights[t, k].item()
                        waiting[key] = waiting.get(key, 0) + weight
            order = list(waiting)
            if capacity.drop == "weight":
                order.sort(key=lambda key: -waiting[key])
            for t, *k in order[capacity.rows :]:
                for slot in k or range(K):
                    if kept[t, slot] // per_rank == rank:
                        kept[t, slot] = -1
        start += count
    return kept


def what_finds_no_room_is_dropped_and_counted(world: World) -> None:
    for deduplicate in (False, True):
        for drop in ("position", "weight"):
            for rows in (0, 2):
                case = made(world)
                capacity = Capacity(rows, drop, deduplicate)  # type: ignore[arg-type]
                kept = kept_within(case, world, capacity)
                dropped = (kept < 0) & (case.topk_indices >= 0) & (case.topk_indices < E)
                assert dropped.any()
                sent = parallel.dispatch(
                    case.part(case.x, world.rank),
                    case.part(case.topk_indices, world.rank),
                    case.part(case.topk_weights, world.rank),
                    num_global_experts=E,
                    transport=capacity,
                    weights_at="expert",
                )
                mine_kept = case.part(kept, world.rank)
                assert sent.topk_indices.tolist() == mine_kept.tolist()
                assert sent.num_dropped == case.part(dropped, world.rank).sum()
                counts = [(mine_kept == e).sum().item() for e in range(E)]
                assert sent.tokens_per_expert.tolist() == counts
                left = Case(**{**vars(case), "topk_indices": kept})
                want = mine(left, world, alone(left))
                if deduplicate:
                    partial = RankTree(1, "fp32", "none")
                    close(together(case, world, capacity, "expert", None, partial), want)
                else:
                    same_bits(together(case, world, capacity, "later"), want)


def bytes_fall_with_the_ranks_of_a_token(world: World) -> None:
    """Rows that leave: one for each choice elsewhere, or one for each other rank chosen."""
    case = made(world, tokens=(64,) * 4)
    ids = case.part(case.topk_indices, world.rank)
    arguments = case.part(case.x, world.rank), ids, case.part(case.topk_weights, world.rank)
    ranks = [{e * world.size // E for e in row if 0 <= e < E} for row in ids.tolist()]
    elsewhere = sum(
        0 <= e < E and e * world.size // E != world.rank for row in ids.tolist() for e in row
    )
    wants = {
        AllToAll(): elsewhere * (4 * H + 4 + 4),
        ONCE[0]: sum(len(r - {world.rank}) for r in ranks) * (4 * H + 8 * K),
        ROOM: 99 * (world.size - 1) * (4 * H + 4 + 4),
    }
    for transport, want in wants.items():
        sent = parallel.dispatch(
            *arguments, num_global_experts=E, transport=transport, weights_at="expert"
        )
        assert sent.bytes_sent == want


def autocast_moves_its_own_dtype(world: World) -> None:
    case = made(world)
    with torch.autocast("cpu", BF16):
        got = together(case, world, AllToAll(), "later")
        want = mine(case, world, alone(case))
    assert got[0].dtype == BF16
    same_bits(got, want)


def static_shapes_compile_as_one_graph(world: World) -> None:
    if world.size > 2:
        return  # the same, and slow
    case = made(world)
    indices = case.part(case.topk_indices, world.rank)

    def run(x: Tensor, weights: Tensor) -> Tensor:
        sent = parallel.dispatch(
            x, indices, weights, num_global_experts=E, transport=ROOM, weights_at="later"
        )
        out = sent.x * 2 + sent.topk_weights
        return parallel.combine(out, sent)

    leaves = [case.part(case.x, world.rank), case.part(case.topk_weights, world.rank)]
    grad = case.part(case.d_out, world.rank)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    same_bits(differentiate(compiled, leaves, grad), differentiate(run, leaves, grad))
