"""What a rehearsed crowd came to: figures, the promises that they keep or break, table and JSON."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from dugnad.averaging.formats import NO_DIGEST, Ack, Header
from dugnad.dht.records import encode
from dugnad.simulation.crowd import LINE_BYTES_PER_S, CrowdPlan, CrowdWorld, Look, play_crowd

CROWDS: Final = {
    "crowd-3000": CrowdPlan(3_000, 0.20),
    "crowd-10000": CrowdPlan(10_000, 0.02),
}
"""Scenarios by name: who wants another crowd calls `play_crowd`."""
TITLES: Final = {
    "crowd-3000": "3 000 peers, a fifth joins or leaves each minute: who knows whom, at what cost",
    "crowd-10000": "10 000 peers, 2 % join or leave each minute: who knows whom, at what cost",
}
ERROR_MAX: Final = 0.02
ROSTER_BYTES_MAX: Final = 1_000.0
CONTROL_SHARE_MAX: Final = 0.01
FRAGMENTS: Final = 24
INTERVAL_S: Final = 60.0
"""A large run: so many fragments, each merged once a minute."""
SEEN_S: Final = 30.0
"""Peers that lived shorter say nothing about bytes a second."""
COLUMNS: Final = (
    "scenario",
    "seed",
    "broken",
    "view error",
    "roster B/s",
    "p99",
    "control",
    "lost after",
    "p95",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class CrowdResult:
    """Figures of one rehearsal. Bytes are what a peer sends; times virtual but for `seconds`."""

    scenario: str
    seed: int
    seconds: float
    error: float
    error_p95: float
    error_max: float
    missing: float
    ghosts: float
    roster_bytes: float
    roster_bytes_p99: float
    control_share: float
    detect_p50_s: float
    detect_p95_s: float
    false_losses: int
    false_now: int
    degree: float
    joined: int
    left: int
    crashed: int
    messages: int
    events: int
    memory_mb: float
    digest: str
    looks: tuple[Look, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    @property
    def violations(self) -> list[str]:
        """What does not hold."""
        found = []
        if not self.error <= ERROR_MAX:
            found.append(f"views are {self.error:.2%} wrong, more than {ERROR_MAX:.0%}")
        if not self.roster_bytes <= ROSTER_BYTES_MAX:
            found.append(f"the roster sends {self.roster_bytes:.0f} B/s a peer, more than 1 kB/s")
        if not self.control_share <= CONTROL_SHARE_MAX:
            found.append(f"control takes {self.control_share:.2%} of a 10 Mbit/s line")
        if self.false_now:
            found.append(f"{self.false_now} live peers are taken for gone at the end")
        return found


def rehearse_crowd(
    name: str,
    plan: CrowdPlan,
    seed: int,
    clock: Callable[[], float],
    tick: Callable[[float], None] = lambda _: None,
) -> CrowdResult:
    """Plays a crowd and measures it; `clock` is real seconds."""
    start = clock()
    world = play_crowd(plan, seed, tick)
    return measured(name, world, seed, clock() - start)


def measured(name: str, world: CrowdWorld, seed: int, seconds: float) -> CrowdResult:
    """The figures of a world that has run."""
    figures, end = world.figures, world.now
    lives = [min(died, end) - born for born, died in zip(world.born, world.died, strict=True)]
    rates = [
        sent / life for sent, life in zip(world.sent_bytes, lives, strict=True) if life >= SEEN_S
    ]
    mean = sum(world.sent_bytes) / sum(lives)
    degree = world.degree()
    errors, looked = np.array(figures.errors), max(1, figures.looked)
    detect = np.array(figures.detected_s or [0.0])
    exchange = exchange_bytes_per_s(degree)
    return CrowdResult(
        scenario=name,
        seed=seed,
        seconds=seconds,
        error=float(errors.mean()),
        error_p95=float(np.quantile(errors, 0.95)),
        error_max=float(errors.max()),
        missing=figures.missing / looked,
        ghosts=figures.ghosts / looked,
        roster_bytes=mean,
        roster_bytes_p99=float(np.quantile(rates, 0.99)),
        control_share=(mean + exchange) / LINE_BYTES_PER_S,
        detect_p50_s=float(np.quantile(detect, 0.5)),
        detect_p95_s=float(np.quantile(detect, 0.95)),
        false_losses=figures.false_losses,
        false_now=figures.false_now,
        degree=degree,
        joined=figures.joined,
        left=figures.left,
        crashed=figures.crashed,
        messages=figures.messages,
        events=figures.events,
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000.0,
        digest=world.digest,
        looks=tuple(figures.looks),
    )


def exchange_bytes_per_s(degree: float) -> float:
    """Computed, not simulated: commit *headers* and one ack each, flooded along the links.

    A commit's list of inputs is not in it: a crowd pulls that by its root, as it does the payload.
    """
    root, big = bytes(32), 2**40
    digest = NO_DIGEST or root
    header = Header(
        1, root, "merge", FRAGMENTS, 2**20, digest, root, big, big, root, root, 4096, big, 2**31,
        2**31, "float32", root, 2**30, root, root, root, digest, 2**31, bytes(64),
    )  # fmt: skip
    ack = Ack(root, FRAGMENTS, 2**20, digest, bytes(64))
    once = len(encode(header)) + len(encode(ack))
    return once * max(1.0, degree - 1.0) * FRAGMENTS / INTERVAL_S


def crowd_row(result: CrowdResult) -> tuple[str, ...]:
    """One line of the table."""
    return (
        result.scenario,
        str(result.seed),
        str(len(result.violations)),
        f"{result.error:.2%}",
        f"{result.roster_bytes:.0f}",
        f"{result.roster_bytes_p99:.0f}",
        f"{result.control_share:.2%}",
        f"{result.detect_p50_s:.1f} s",
        f"{result.detect_p95_s:.1f} s",
        f"{result.seconds:.0f}",
    )
