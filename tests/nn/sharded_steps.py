"""One of two processes that train a layer sharded by FSDP2: `python sharded_steps.py STORE RANK`.

Rank 1 has a single token, so that most experts get none there. All parameters must have a gradient on both
ranks, and losses and parameters must follow those of one process with the mean of both gradients.
"""

import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tokenyard.nn import MoE

TOKENS = 11, 1


def losses_of(moe: MoE, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [moe(x_TH)[0].square().mean() for x_TH in inputs]


def follow(low_rank: bool, rank: int) -> None:
    torch.manual_seed(3)
    single = MoE(8, 6, 3, 2, shared_intermediate_size=5, dtype=torch.float64)
    if low_rank:
        single.experts.add_lora(2)
        torch.nn.init.normal_(single.experts.down_proj_lora_b)
    inputs = [torch.randn(num_tokens, 8, dtype=torch.float64) for num_tokens in TOKENS]
    sharded = fully_shard(copy.deepcopy(single))
    optimizers = [torch.optim.SGD(moe.parameters(), lr=0.1) for moe in (single, sharded)]
    for _ in range(3):
        losses = losses_of(single, inputs)
        torch.stack(losses).mean().backward()
        (mine,) = losses_of(sharded, [inputs[rank]])
        mine.backward()
        torch.testing.assert_close(mine, losses[rank])
        for (name, whole), part in zip(single.named_parameters(), sharded.parameters()):
            assert (part.grad is not None) == part.requires_grad, name
            if isinstance(part.grad, DTensor):
                torch.testing.assert_close(part.grad.full_tensor(), whole.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for whole, part in zip(single.parameters(), sharded.parameters()):
        assert isinstance(part, DTensor)
        torch.testing.assert_close(part.full_tensor(), whole)


def main(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for low_rank in (False, True):
        follow(low_rank, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
