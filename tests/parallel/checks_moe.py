"""nn.MoE with its experts on several ranks against the layer on one process; FSDP2; checkpoints."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import assert_same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint
from world import World

import tokenyard
from tokenyard import ArgumentError, RankTree
from tokenyard.nn import MoE
from tokenyard.parallel import AllToAll, Capacity, ExpertParallel

H = 8
TOKENS = 5, 0, 9, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated shared": {"shared_intermediate_size": 5, "shared_gate": True},
    "capacity": {"capacity_factor": 0.5},
    "gpt-oss": {
        "activation": "clamped_swiglu",
        "experts": {"bias": True, "gate_up_layout": "interleaved", "weight_layout": "EKN"},
    },
    "llama4": {"experts": {"weights_on": "input"}, "router": {"score": "sigmoid"}},
    "uneven": {"num_experts": 7},
    "low rank": {},
}


def made(variant: str = "plain", dtype: torch.dtype = torch.float32) -> MoE:
    """The same on every rank."""
    torch.manual_seed(11)
    options = {"num_experts": 8} | VARIANTS[variant]
    moe = MoE(H, 6, top_k=3, dtype=dtype, **options)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5)
    if variant == "low rank":
        moe.experts.add_lora(2)
        nn.init.normal_(moe.experts.down_proj_lora_b)
    return moe


def inputs(world: World, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The tokens of every rank."""
    torch.manual_seed(12)
    return [torch.randn(count, H, dtype=dtype) for count in TOKENS[: world.size]]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def summed_over_ranks(moe: MoE) -> dict[str, Tensor]:
    """All gradients of the sum of the losses of all ranks."""
    gradients = {}
    for name, parameter in moe.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if isinstance(parameter.grad, DTensor):
            gradients[name] = parameter.grad.full_tensor()
        elif parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
            dist.all_reduce(gradients[name])
    return gradients


def on_one_process(moe: MoE, xs: list[Tensor]) -> list[Tensor]:
    """The router on each rank's tokens, whose bits depend on their number; the experts on all."""
    if moe.capacity_factor is not None:  # every rank's own tokens compete
        return [moe(x)[0] for x in xs]
    _, weights, indices = map(torch.cat, zip(*(moe.gate(x) for x in xs)))
    out = moe.experts(torch.cat(xs), tokenyard.route(indices, moe.gate.num_experts), weights)
    outs = list(out.split([len(x) for x in xs]))
    if moe.shared_expert is not None:
        outs = [out + moe._shared(x) for out, x in zip(outs, xs)]
    return outs


def equals_one_process(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",))
    for variant in VARIANTS:
        for transport in (AllToAll(), Capacity(50), AllToAll(deduplicate=True)):
            single, xs = made(variant), inputs(world)
            x = xs[world.rank].clone().requires_grad_()
            grads = [torch.randn(len(x), H) for x in xs]
            moe = parallelize_module(
                nn.ModuleList([copy.deepcopy(single)]),
                mesh["ep"],
                {"*": ExpertParallel(transport=transport)},
            )[0]
            out, statistics = moe(x)
            out.backward(grads[world.rank])

            alone = [x.clone().requires_grad_() for x in xs]
            wants = on_one_process(single, alone)
            torch.autograd.backward(wants, grads)
            x_single = alone[world.rank]
            assert x.grad is not None and x_single.grad is not None
            torch.testing.assert_close(out, wants[world.rank], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(x.grad, x_single.grad, rtol=1e-4, atol=1e-5)
            gradients = summed_over_ranks(moe)
            for name, parameter in single.named_parameters():
                if parameter.grad is None:
                    assert name not in gradients
                    continue
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
                if not transport.deduplicate and variant == "plain" and name.startswith("experts"):
                    assert_same_bits(gradients[name], parameter.grad)
            if not transport.deduplicate and variant in ("plain", "uneven"):
                assert_same_bits(out, wants[world.rank])
                assert_same_bits(x.grad, x_single.grad)
            _, want = single(xs[world.rank])
            assert statistics.tokens_per_expert.tolist() == want.tokens_per_expert.tolist()
            assert statistics.num_dropped == want.num_dropped


def the_sum_is_that_of_the_experts_or_of_the_style(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",))
    single, xs = made(dtype=torch.bfloat16), inputs(world, torch.bfloat16)
    tree, results = RankTree(world.size, "fp64", "fp64"), []
    single.experts.reduction = tree
    want = on_one_process(single, xs)[world.rank]
    for transport in (AllToAll(), AllToAll(deduplicate=True), Capacity(50, deduplicate=True)):
        for reduction in (None, tree):
            moe = copy.deepcopy(single)
            moe.experts.reduction = "slot" if reduction else tree
            style = ExpertParallel(transport=transport, reduction=reduction)
            results.append(parallelize_module(moe, mesh, style)(xs[world.rank])[0])
    for result in results:
        assert_same_bits(result, want)


def no_room_is_in_the_statistics(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",))
    for transport in (Capacity(1), Capacity(1, deduplicate=True)):
        moe = parallelize_module(made(), mesh, ExpertParallel(transport=transport))
        _, statistics = moe(inputs(world)[world.rank])
        routed = int(statistics.tokens_per_expert.sum())
        assert routed + statistics.num_dropped == 3 * TOKENS[world.rank]
        assert statistics.num_dropped > 0 or TOKENS[world.rank] == 0


def recomputation_gives_the_same_gradients(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",))
    moe = parallelize_module(made("gated shared"), mesh, ExpertParallel())
    results = []
    for run in (moe, lambda x: checkpoint(moe, x, use_reentrant=False)):
        moe.zero_grad()
        x = inputs(world)[world.rank].requires_grad_()
        run(x)[0].square().sum().backward()
        results.append([x.grad, *(p.grad for p in moe.parameters())])
    for got, want in zip(*results):
        assert torch.equal(whole(got), whole(want))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.moe = made("gated shared")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + self.moe(hidden)[0]


def experts_and_data_sharded_on_a_mesh_of_two_by_two(world: World) -> None:
    """FSDP2 shards the experts over dp, what every rank has over all; three steps of SGD."""
    if world.size != 4:
        return
    torch.manual_seed(13)
    single = Model()
    model = copy.deepcopy(single)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {"moe": ExpertParallel()})
    fully_shard(model.moe.experts, mesh=mesh["dp"])
    model.moe.experts.set_gradient_divide_factor(world.size)
    model.moe.experts.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale as it adds
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (single, model)]
    for _ in range(3):
        xs = inputs(world)
        losses = [single(x).square().sum() / 50 for x in xs]
        torch.stack(losses).mean().backward()
        loss = model(xs[world.rank]).square().sum() / 50
        loss.backward()
        torch.testing.assert_close(loss, losses[world.rank])
        for (name, parameter), part in zip(single.named_parameters(), model.parameters()):
            assert part.grad is not None, name
            torch.testing.assert_close(whole(part.grad), parameter.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, part in zip(single.parameters(), model.parameters()):
        torch.testing.assert_close(whole(part), parameter, rtol=1e-4, atol=1e-5)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in single.state_dict().items()
    }
    folder = str(world.folder / "sharded twice")
    dcp.save(model.state_dict(), checkpoint_id=folder)
    if world.rank == 0:
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(blank, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(blank[name], state[name]) for name in state)
    dist.barrier()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Model(), Model()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def the_lines_of_the_readme(world: World) -> None:
    """Their gradients are those of the mean loss of all ranks."""
    text = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    torch.manual_seed(13)
    single = Layers()
    model, xs = copy.deepcopy(single), inputs(world)
    exec(lines, {"model": model, "device": "cpu"})
    if world.size > 2:  # "dp" has two ranks, and Gloo cannot scale as it adds
        for layer in model.layers:
            layer.moe.experts.set_force_sum_reduction_for_comms(True)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    outs = [single(x) for x in xs]
    torch.stack([out.square().sum() for out in outs]).mean().backward()
    out = model(xs[world.rank])
    torch.testing.assert_close(out, outs[world.rank], rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    for (name, parameter), part in zip(single.named_parameters(), model.parameters()):
        assert part.grad is not None and parameter.grad is not None, name
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(whole(part.grad), parameter.grad, rtol=1e-4, atol=1e-5 * scale)


def a_checkpoint_of_four_ranks_is_read_by_two_and_by_one(world: World) -> None:
    if world.size != 4:
        return
    folder = str(world.folder / "checkpoint")
    single = made("gated shared")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    moe = parallelize_module(copy.deepcopy(single), mesh, ExpertParallel())
    dcp.save(moe.state_dict(), checkpoint_id=folder)
    x = inputs(world)[0]
    want = single(x)[0]
    two = dist.new_group([0, 1])
    if world.rank < 2:
        blank = made("gated shared")
        for parameter in blank.parameters():
            nn.init.zeros_(parameter)
        pair = DeviceMesh.from_group(two, "cpu", mesh_dim_names=("ep",))
        parallelize_module(blank, pair, ExpertParallel())
        state = blank.state_dict()
        dcp.load(state, checkpoint_id=folder, process_group=two)
        blank.load_state_dict(state)
        torch.testing.assert_close(blank(x)[0], want)
    if world.rank == 0:
        blank = made("gated shared")
        for parameter in blank.parameters():
            nn.init.zeros_(parameter)
        state = blank.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        blank.load_state_dict(state)
        assert torch.equal(blank(x)[0], want)
    dist.barrier()


def what_cannot_be_is_refused(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("ep",))
    with pytest.raises(
        ArgumentError, match=r"ExpertParallel: `module`: expected a tokenyard\.nn\.MoE"
    ):
        parallelize_module(nn.Linear(2, 2), mesh, ExpertParallel())
    with pytest.raises(ArgumentError, match=r"experts for each of the \d ranks"):
        parallelize_module(MoE(H, 6, 1, 1), mesh, ExpertParallel())
    with pytest.raises(ArgumentError, match=r"`transport\.rows`"):
        ExpertParallel(transport=Capacity(-1))
