"""One rank's failure as an error on all, in place of a hang."""

import time
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import check
from tokenyard.parallel.groups import Group, process_group

_POLL = timedelta(milliseconds=200)
_GRACE = 2.0
"""Seconds that a rank whose connection broke waits for the reason."""
_LONGEST = 2000
"""Characters of a reason."""

_watches: dict[str, "fail_together"] = {}
_entered: dict[str, int] = {}
"""How often, by the name of a group: each time has a key of its own."""


class PeerError(RuntimeError):
    """Another rank failed, or none answered in time; the group is of no use any more."""


class fail_together(AbstractContextManager["fail_together"]):
    """While active, what one rank of `group` raises is a `PeerError` with its message on the others.

    group     a process group, a device mesh of one dimension, or None for all processes
    timeout   seconds that one exchange of this package may take until the other ranks have come to it

    An error on one rank is written to the group's store before it is raised. The others find it where
    they wait for that rank in `dispatch` or `combine`; errors that another library's collective raises
    meanwhile, such as a closed connection, are traced back to it. All ranks enter at the same point.
    Over all processes it also serves the groups within that have none of their own, as those of a mesh.
    On a GPU the wait is that for the counts of `AllToAll`: other exchanges are bounded by the
    timeout of the process group.
    """

    def __init__(self, group: Group = None, *, timeout: float) -> None:
        self.group = process_group("parallel.fail_together", group)
        check.number("parallel.fail_together", "timeout", timeout)
        if not timeout > 0:
            check.fail("parallel.fail_together", "timeout", "seconds above 0", timeout)
        self.timeout = timeout
        self._key = ""

    def __enter__(self) -> "fail_together":
        name = self.group.group_name
        if name in _watches:
            raise RuntimeError("tokenyard.parallel.fail_together: already active for this group")
        _entered[name] = _entered.get(name, 0) + 1
        self._key = f"tokenyard/failure/{_entered[name]}"
        _watches[name] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del _watches[self.group.group_name]
        if error is None or isinstance(error, PeerError):
            return
        reason = self._reason(_GRACE if isinstance(error, RuntimeError) else 0.0)
        if reason is not None:
            raise PeerError(reason) from error
        text = f"rank {dist.get_rank()} raised {type(error).__name__}: {error}"
        self.group.get_group_store().set(self._key, text[:_LONGEST])

    def _reason(self, patience: float = 0.0) -> str | None:
        """What another rank wrote, or None."""
        store, until = self.group.get_group_store(), time.monotonic() + patience
        while True:
            if store.check([self._key]):
                return store.get(self._key).decode(errors="replace")
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL.total_seconds() / 4)

    def look(self, since: float) -> None:
        """Raise if another rank failed, or the wait that began at `since` is over."""
        reason = self._reason()
        if reason is None and time.monotonic() - since > self.timeout:
            reason = (
                f"rank {dist.get_rank()} waited {self.timeout:g} s for the other ranks of its group: "
                "one hangs, is slow, or makes other calls"
            )
        if reason is not None:
            raise PeerError(reason)


def _watch(group: dist.ProcessGroup) -> "fail_together | None":
    """That of this group, or of all processes."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return _watches.get(group.group_name) or _watches.get(everyone.group_name)


def wait(group: dist.ProcessGroup, work: dist.Work, device: torch.device) -> None:
    """Wait for a collective; on a GPU let the current stream wait."""
    watch = _watch(group)
    if watch is None or device.type == "cuda":
        work.wait()
        return
    since = time.monotonic()
    while True:
        try:
            work.wait(_POLL)
            return
        except RuntimeError:
            if work.is_completed():  # by failing, not by taking long
                raise
        watch.look(since)


def read(group: dist.ProcessGroup, values: Tensor) -> list[list[int]]:
    """The values [N,M] on the host."""
    watch = _watch(group)
    if watch is None or not values.is_cuda:
        found: list[list[int]] = values.tolist()
        return found
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    since, pause = time.monotonic(), 0.0
    while not arrived.query():
        if time.monotonic() - since > 0.01:
            pause = min(pause + 0.001, _POLL.total_seconds())
            watch.look(since)
            time.sleep(pause)
    found = host.tolist()
    return found
