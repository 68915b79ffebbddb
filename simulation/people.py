"""The simulated peers: keys, disks, learners' numbers, and what they told of themselves."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.exchange import Exchange
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import FragmentWorker
from dugnad.dht.ids import PeerId
from dugnad.peer.progress import ProgressLog
from dugnad.simulation.story import Told

KNOWN_MAX: Final = 32
"""Peers that a disk remembers: one that answers is enough, and half of them may be gone."""
STORY_MAX: Final = 400
"""Lines of a peer's story kept for a violation."""


def peer_of(number: int) -> PeerId:
    """The key of simulated peer ``number``."""
    return PeerId(hashlib.sha256(f"peer {number}".encode()).digest())


def seal(peer: PeerId, message: bytes) -> bytes:
    """A stand-in for a signature: 64 bytes that depend on the peer and the message."""
    one = hashlib.sha256(peer + message).digest()
    return one + one


@dataclass(frozen=True, slots=True)
class SimSigner:
    """Signs with :func:`seal`."""

    peer: PeerId

    def sign(self, message: bytes) -> bytes:
        """The stand-in signature of ``message``."""
        return seal(self.peer, message)


@dataclass(slots=True)
class Disk:
    """What survives a crash: promises and the newest seq, per fragment; in a
    :class:`dugnad.simulation.stage.Stage` also the head and its anchors, as the daemon keeps them.
    """

    seqs: dict[int, int] = field(default_factory=dict)
    headers: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    """(fragment, parent) -> the header signed on top of it."""
    heads: dict[int, tuple[fm.Checkpoint, bytes, AnchorState]] = field(default_factory=dict)
    """Fragment -> the newest head, its digest and its anchors."""
    promises: dict[int, tuple[bytes, fm.CommitRecord, bytes]] = field(default_factory=dict)
    """Fragment -> digest, record and payload of the newest commit that it signed."""
    known: dict[PeerId, int] = field(default_factory=dict)
    """Peers that were met, with their numbers: the newest of them."""

    def copy(self) -> Disk:
        """A snapshot of it."""
        return Disk(
            dict(self.seqs),
            dict(self.headers),
            dict(self.heads),
            dict(self.promises),
            dict(self.known),
        )

    def remember(self, peer: PeerId, number: int) -> None:
        """A peer was met; those met longest ago are forgotten."""
        self.known.pop(peer, None)
        self.known[peer] = number
        while len(self.known) > KNOWN_MAX:
            del self.known[next(iter(self.known))]


@dataclass(slots=True)
class SimFragment:
    """One fragment of one peer: core, numbers, and the learner's part of it."""

    core: Exchange
    worker: FragmentWorker
    theta: Vector
    progress: np.ndarray
    """All inner progress since the start (G of the invariant), float64."""
    rounding: np.ndarray
    """Rounding of own merges that stands in the residual without being progress."""
    given_up: np.ndarray
    """Progress listed in a lineage that was left more than F versions deep, without its join."""
    head: bytes
    timer: int = 0
    events: int = 0


@dataclass(slots=True)
class SimPeer:
    """One simulated daemon with its learner."""

    number: int
    peer: PeerId
    rng: random.Random
    disk: Disk
    fragments: list[SimFragment]
    log: ProgressLog
    """What it has trained and not handed in, and what came back: as the daemon keeps it."""
    alive: bool = True
    frozen_until: float = 0.0
    asleep_since: float | None = None
    """Frozen with a closed lid: its timers stood still from then on."""
    step: int = 0
    step_s: float = 0.25
    live: set[PeerId] = field(default_factory=set)
    story: deque[Told] = field(default_factory=lambda: deque(maxlen=STORY_MAX))
    """What happened, put into words only for a violation."""
    born: int = 0
    """Counts restarts: what was scheduled for an earlier life is dropped."""


def draws(rng: random.Random, count: int) -> list[int]:
    """``count`` whole numbers from -64 to 64: what ``randint`` draws, at a fifth of its time."""
    drawn: list[int] = []
    while len(drawn) < count:
        bits = rng.getrandbits(8)
        if bits <= 128:
            drawn.append(bits - 64)
    return drawn


def play_step(sim: SimPeer, size: int) -> None:
    """One step of the played learner: whole numbers over 8192, exact in float32."""
    for fragment in sim.fragments:
        gain = np.array(draws(sim.rng, size), np.float32) / np.float32(8192)
        before = fragment.theta.astype(np.float64)
        fragment.theta = fragment.theta - gain
        fragment.progress += before - fragment.theta
