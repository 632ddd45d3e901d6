"""What a benchmark file yields and the harness times."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers import Functions


@dataclass
class Case:
    """A call to be timed. `check` raises unless its results are right.

    num_bytes    each input read once, each output written once; 0 where bytes are not the bound
    written      of these, the bytes written
    num_flops    without padding; 0 where they are not the bound
    rounds       of turns that the sides take
    repeat       milliseconds that a turn is timed, after half as many that are not
    facts        what else the result is to say
    """

    name: str
    run: Callable[[], object]
    check: Callable[[], None]
    peers: Functions = field(default_factory=dict)
    num_bytes: int = 0
    written: int = 0
    num_flops: int = 0
    rounds: int = 3
    repeat: int = 25
    facts: dict[str, Any] = field(default_factory=dict)
