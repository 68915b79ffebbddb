"""What happens to whom and when in `churn.py`: a schedule of faults that follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EVERY_S: Final = 15.0
"""Between two faults."""
AWAY_S: Final = (3.0, 9.0)
"""How long a peer is away; shorter than the time between two faults, so that a fault meets a swarm
in which one peer at most is away and one is coming back."""
SPARED_S: Final = 18.0
"""A peer that came back is left in peace this long, so that its return can be measured."""


class Kind(StrEnum):
    """What is done to a peer."""

    KILL = "kill"
    """SIGKILL to the daemon; started again later from the same disk."""
    RESTART = "restart"
    """SIGTERM, a graceful leave; started again at once when it has ended."""
    FREEZE = "freeze"
    """SIGSTOP to all of its processes, then SIGCONT: a lid that is closed and opened."""
    HANG = "hang"
    """SIGSTOP to the daemon alone, then SIGCONT: its libp2p daemon still takes connections."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Times are seconds from the beginning of the faults; ``peer`` counts from 0."""

    at_s: float
    peer: int
    kind: Kind
    away_s: float


def schedule(seed: int, peers: int, seconds: float, every_s: float = EVERY_S) -> list[Fault]:
    """The faults of a run, one each ``every_s``, the last one early enough to be watched.

    The kinds come in shuffled rounds, so that a short run has all of them.
    """
    rng = random.Random(f"churn/{seed}")
    free_at = [0.0] * peers
    kinds: list[Kind] = []
    found = []
    count = int(seconds / every_s)
    for number in range(count):
        at = number * every_s + every_s / 2
        if not kinds:
            kinds = rng.sample(list(Kind), len(Kind))
        free = [peer for peer in range(peers) if free_at[peer] <= at]
        if not free:
            continue
        peer, away = rng.choice(free), rng.uniform(*AWAY_S)
        found.append(Fault(at, peer, kinds.pop(), away))
        free_at[peer] = at + away + SPARED_S
    return found
