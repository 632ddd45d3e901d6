"""Process groups: what a caller may pass, and how experts are spread over one."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenyard import check

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a device mesh of one dimension, or None for all processes."""


def process_group(operator: str, group: object) -> dist.ProcessGroup:
    """The process group meant by `group`, of which this process is a member."""
    if not (dist.is_available() and dist.is_initialized()):
        check.fail(operator, "group", "torch.distributed.init_process_group before", "none")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            check.fail(operator, "group", "a device mesh of one dimension", repr(group))
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        check.fail(operator, "group", "a group of which this process is a member", "another")
    if not isinstance(group, dist.ProcessGroup):
        check.fail(operator, "group", "a process group or a device mesh", check.describe(group))
    return group


def experts_per_rank(operator: str, num_global_experts: int, num_ranks: int) -> int:
    """Experts of every rank but the last, which may have fewer: those of `torch.chunk`."""
    check.at_least(operator, "num_global_experts", num_global_experts, 1)
    most = -(-num_global_experts // num_ranks)
    if most * (num_ranks - 1) >= num_global_experts:
        expected = f"experts for each of the {num_ranks} ranks, {most} on all but the last"
        check.fail(operator, "num_global_experts", expected, num_global_experts)
    return most
