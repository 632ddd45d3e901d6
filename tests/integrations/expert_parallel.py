"""One of two processes that run transformers' expert parallelism: `python expert_parallel.py STORE RANK`.

The experts are halved between the ranks; outputs and gradients must be those of the whole, with one batch
that both ranks share, and with a batch of each rank's own.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations import tiny

from tokenyard.integrations import transformers as switch

MODULE = "transformers.models.mixtral.modeling_mixtral"


def main(store: str, rank: int) -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    switch.register()
    torch.manual_seed(5)
    both = DeviceMesh("cpu", [0, 1])
    alone = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("other", "own"))["own"]
    for shared in (True, False):
        whole = tiny.experts_of(MODULE, "MixtralExperts").double()
        whole.config._experts_implementation = switch.NAME
        half = tiny.experts_of(MODULE, "MixtralExperts").double()
        half.config._experts_implementation = switch.NAME
        half.num_experts = 2
        for name, value in whole.named_parameters():
            setattr(half, name, torch.nn.Parameter(value.detach()[2 * rank : 2 * rank + 2]))
        implementation = EPImplementationInterface()[switch.NAME]
        forward = implementation(half, both, both if shared else alone)

        batches = [torch.randn(7 + 4 * r, 16).double() for r in range(2)]
        choices = [torch.rand(len(x), 4).topk(2).indices for x in batches]
        weights = [torch.rand(len(x), 2).double() for x in batches]
        mine = 0 if shared else rank
        x, w = batches[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
        out = forward(x, choices[mine], w)
        out.square().sum().backward()

        used = [0] if shared else [0, 1]
        leaves = [(batches[r].requires_grad_(), weights[r].requires_grad_()) for r in used]
        wants = [whole(xs, choices[r], ws) for r, (xs, ws) in zip(used, leaves)]
        sum(want.square().sum() for want in wants).backward()
        torch.testing.assert_close(out, wants[used.index(mine)])
        torch.testing.assert_close(x.grad, leaves[used.index(mine)][0].grad)
        torch.testing.assert_close(w.grad, leaves[used.index(mine)][1].grad)
        for part, value in zip(half.parameters(), whole.parameters()):
            torch.testing.assert_close(part.grad, value.grad[2 * rank : 2 * rank + 2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
