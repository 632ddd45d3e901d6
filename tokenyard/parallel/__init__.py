"""Expert parallelism over torch.distributed: experts on several ranks, tokens sent to them and back.

A layer over a mesh of one process; torchrun starts more, and gives their number and ranks:

>>> import torch
>>> import torch.distributed as dist
>>> from torch.distributed.device_mesh import init_device_mesh
>>> from torch.distributed.tensor.parallel import parallelize_module
>>> from tokenyard.nn import MoE
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
>>> moe = parallelize_module(MoE(64, 32, num_experts=8, top_k=2), mesh["ep"], ExpertParallel())
>>> out, statistics = moe(torch.randn(5, 64))
>>> out.shape, moe.experts.down_proj.placements
(torch.Size([5, 64]), (Shard(dim=0),))
>>> dist.destroy_process_group()
"""

from tokenyard.parallel.dispatch import Dispatched, combine, dispatch
from tokenyard.parallel.failures import PeerError, fail_together
from tokenyard.parallel.style import ExpertParallel
from tokenyard.parallel.transports import AllToAll, Capacity

__all__ = [
    "AllToAll",
    "Capacity",
    "Dispatched",
    "ExpertParallel",
    "PeerError",
    "combine",
    "dispatch",
    "fail_together",
]
