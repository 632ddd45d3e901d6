"""Expert parallelism against one process: values and gradients of the layer; FSDP2; checkpoints.

Every rank computes what one process would, from the tokens of all ranks, and compares its own part.
"""

import copy
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import measure
from benchmarks.ranks import Ranks
from benchmarks.shapes import Shape
from tokenyard import RankTree, route
from tokenyard.nn import MoE
from tokenyard.ops.unpermute import Reduction
from tokenyard.parallel import AllToAll, Capacity, ExpertParallel
from tokenyard.parallel.transports import Transport

TOKENS = 512
EXPERTS = 64
"""Most experts of a check: one GPU has all of them, with their gradients, twice."""

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of relative errors of what is not promised bit for bit."""

BITS = ("out", "d_x", "d_gate_up", "d_down")


class Inputs(NamedTuple):
    """Of every rank; each has another number of tokens."""

    xs: list[Tensor]
    ids: list[Tensor]
    d_outs: list[Tensor]


def inputs_of(ranks: Ranks, shape: Shape, dtype: torch.dtype) -> Inputs:
    found = Inputs([], [], [])
    for rank in range(ranks.size):
        ranks.seed(1, rank)
        num_tokens = max(shape.T - 3 * rank, 0)
        found.xs.append(ranks.randn(num_tokens, shape.H, dtype=dtype).requires_grad_())
        scores = torch.rand(num_tokens, shape.E, device=ranks.device)
        found.ids.append(scores.topk(shape.K).indices)
        found.d_outs.append(ranks.randn(num_tokens, shape.H, dtype=dtype))
    return found


def made(ranks: Ranks, shape: Shape, dtype: torch.dtype) -> MoE:
    ranks.seed(0)
    return MoE(shape.H, shape.I, shape.E, shape.K, device=ranks.device, dtype=dtype)


def parameters_of(moe: MoE) -> list[nn.Parameter]:
    return [moe.gate.weight, moe.experts.get_parameter("gate_up_proj"), moe.experts.down_proj]


def alone(moe: MoE, inputs: Inputs) -> dict[str, list[Tensor]]:
    """Of one process, by rank: the router on each rank's tokens, the experts on all."""
    weights = [moe.gate(x, ids).topk_weights for x, ids in zip(inputs.xs, inputs.ids)]
    routing = route(torch.cat(inputs.ids), moe.gate.num_experts)
    out = moe.experts(torch.cat(inputs.xs), routing, torch.cat(weights))
    leaves = [*inputs.xs, *parameters_of(moe)]
    *d_xs, d_gate, d_gate_up, d_down = torch.autograd.grad(out, leaves, torch.cat(inputs.d_outs))
    size = len(inputs.xs)
    return {
        "out": list(out.detach().split([len(x) for x in inputs.xs])),
        "d_x": d_xs,
        "d_gate": [d_gate] * size,
        "d_gate_up": list(d_gate_up.chunk(size)),
        "d_down": list(d_down.chunk(size)),
    }


def together(moe: MoE, inputs: Inputs, rank: int) -> dict[str, Tensor]:
    """Of this rank, d_gate summed over the ranks."""
    x = inputs.xs[rank]
    out = moe(x, inputs.ids[rank])[0]
    leaves = [x, *parameters_of(moe)]
    gradients: list[Any] = list(torch.autograd.grad(out, leaves, inputs.d_outs[rank]))
    d_x, d_gate, d_gate_up, d_down = gradients
    dist.all_reduce(d_gate)
    local = {"d_gate_up": d_gate_up.to_local(), "d_down": d_down.to_local()}
    return {"out": out.detach(), "d_x": d_x, "d_gate": d_gate} | local


def variants(ranks: Ranks, shape: Shape) -> list[tuple[Transport, Reduction]]:
    """Nothing is dropped."""
    tree = RankTree(ranks.size)
    per_rank = -(-shape.E // ranks.size)
    most = Capacity(shape.T * min(shape.K, per_rank))
    exact: list[tuple[Transport, Reduction]] = [
        (transport, reduction) for transport in (AllToAll(), most) for reduction in ("slot", tree)
    ]
    once = AllToAll(deduplicate=True), Capacity(shape.T, deduplicate=True)
    return exact + [(transport, tree) for transport in once]


def check_layer(ranks: Ranks, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The layer over all ranks against one process; stops where they differ."""
    experts = min(shape.E, max(EXPERTS, ranks.size))
    experts -= experts % ranks.size  # as a RankTree of all ranks needs
    shape = replace(shape, T=min(shape.T, TOKENS), E=experts)
    whole, inputs = made(ranks, shape, dtype), inputs_of(ranks, shape, dtype)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("ep",))
    moe, wants = copy.deepcopy(whole), {}
    parallelize_module(moe, mesh, ExpertParallel())
    problems: list[str] = []
    errors: dict[str, float] = {}
    for transport, reduction in variants(ranks, shape):
        if reduction not in wants:
            whole.experts.reduction = reduction
            wants[reduction] = alone(whole, inputs)
        moe.dispatcher.transport = transport  # type: ignore[attr-defined]
        moe.dispatcher.reduction = reduction  # type: ignore[attr-defined]
        got = together(moe, inputs, ranks.rank)
        bits = ("out",) if transport.deduplicate else BITS
        for name, value in got.items():
            want = wants[reduction][name][ranks.rank]
            error = measure.relative_error(value, want)
            errors[name] = max(errors.get(name, 0.0), error)
            what = f"{name} of {transport}, {reduction}, {dtype}"
            if not error < LIMITS[dtype]:
                problems.append(f"{what} is off by {error:.1e}")
            elif name in bits and not torch.equal(value, want):
                problems.append(f"{what} has other bits than one process; off by {error:.1e}")
    ranks.agree(problems)
    return {
        "tokens": shape.T,
        "experts": shape.E,
        "dtype": str(dtype).removeprefix("torch."),
        "same_bits": f"{', '.join(BITS)}; of deduplicating transports out",
        "largest_relative_errors": {name: ranks.most(error) for name, error in errors.items()},
    }


SMALL = Shape("small", T=24, K=3, E=16, H=64, I=32)


class Model(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        ranks.seed(3)
        self.first = nn.Linear(SMALL.H, SMALL.H, device=ranks.device)
        self.moe = MoE(SMALL.H, SMALL.I, SMALL.E, SMALL.K, device=ranks.device)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + self.moe(hidden, ids)[0]


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def meshes(size: int) -> list[tuple[int, int]]:
    """(data, experts)"""
    if size == 2:
        return [(1, 2), (2, 1)]
    return [(2, size // 2)] if size % 2 == 0 else [(1, size)]


def sharded(ranks: Ranks, model: Model, shape: tuple[int, int]) -> Model:
    kind = ranks.device.type
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {"moe": ExpertParallel()})
    experts: Any = fully_shard(model.moe.experts, mesh=mesh["dp"])
    experts.set_gradient_divide_factor(ranks.size)
    experts.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale as it adds
    fully_shard(model, mesh=init_device_mesh(kind, (ranks.size,)))
    return model


def check_mesh(ranks: Ranks, shape: tuple[int, int], steps: int = 3) -> dict[str, Any]:
    """FSDP2 over data and experts: the losses of one process; a checkpoint that fewer ranks read."""
    single = Model(ranks)
    model = sharded(ranks, copy.deepcopy(single), shape)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (single, model)]
    inputs = inputs_of(ranks, SMALL, torch.float32)
    problems, losses = [], []
    for _ in range(steps):
        batches = zip(inputs.xs, inputs.ids)
        wants = [single(x.detach(), ids).square().mean() for x, ids in batches]
        torch.stack(wants).mean().backward()
        loss = model(inputs.xs[ranks.rank].detach(), inputs.ids[ranks.rank]).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((float(loss.detach()), float(wants[ranks.rank].detach())))
    problems += [f"loss {got} where one process has {want}, mesh {shape}" for got, want in losses
                 if not abs(got - want) < 1e-4 * abs(want)]  # fmt: skip
    if not losses[-1][0] < losses[0][0]:
        problems.append(f"losses do not fall: {losses}")
    ranks.agree(problems)
    half = max(ranks.size // 2, 1)
    ranks.agree(_reread(ranks, model, half))
    return {
        "mesh": f"{shape[0]} data x {shape[1]} experts",
        "losses": [ranks.mean(got) for got, _ in losses],
        "checkpoint": f"saved by {ranks.size} ranks, read by {half} and by one process",
    }


def _reread(ranks: Ranks, model: Model, half: int) -> list[str]:
    """Problems of a checkpoint that all ranks save, and the first `half` of them and one process read."""
    state = {name: full(value) for name, value in model.state_dict().items()}
    folder = tempfile.TemporaryDirectory() if ranks.rank == 0 else None
    names = [folder.name if folder else ""]
    dist.broadcast_object_list(names)
    save(model.state_dict(), checkpoint_id=names[0])
    group = dist.new_group(list(range(half)))
    reads: dict[str, dict[str, Any]] = {}
    if ranks.rank < half:
        mesh = DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("ep",))
        blank = parallelize_module(Model(ranks), mesh, {"moe": ExpertParallel()})
        read = reads["half of the ranks"] = _zeros(blank)
        load(read, checkpoint_id=names[0], process_group=group)
    if ranks.rank == 0:
        read = reads["one process"] = _zeros(Model(ranks))
        load(read, checkpoint_id=names[0], no_dist=True)
    problems = [
        f"{name} of a checkpoint is other than saved, read by {reader}"
        for reader, read in reads.items()
        for name, value in read.items()
        if not torch.equal(full(value), state[name])
    ]
    dist.barrier()
    if folder:
        folder.cleanup()
    return problems


def _zeros(model: nn.Module) -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
