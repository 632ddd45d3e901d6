"""Expert parallelism over torch.distributed: experts on several ranks, tokens sent to them and back."""

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
