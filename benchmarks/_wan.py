"""A wide-area network as a queue of packets in flight: pure, no clock, no socket, given chance.

Each host has one line with its own rate up and down, a one-way delay, random loss, and a queue that
drops at its tail. A packet waits for the sender's line, travels for both delays, waits for the
receiver's line, and is delivered. Between groups of a partition nothing passes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

IN_FLIGHT_MAX: Final = 100_000
"""Packets held at once, about 150 MB: two seconds of a gigabit; beyond it packets are dropped."""


@dataclass(frozen=True, slots=True)
class Line:
    """A host's access line. Mbit/s up and down, one-way delay in ms, share of packets lost each
    way, and how many ms of traffic its queues hold."""

    up_mbit: float = 100.0
    down_mbit: float = 100.0
    delay_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float = 200.0

    def __post_init__(self) -> None:
        """ValueError for a line that carries nothing or less."""
        if min(self.up_mbit, self.down_mbit, self.queue_ms) <= 0.0:
            raise ValueError("rates and queues are above 0")
        if self.delay_ms < 0.0 or not 0.0 <= self.loss < 1.0:
            raise ValueError("a delay is not negative, and loss is at least 0 and below 1")


@dataclass(slots=True)
class Counts:
    """What became of the packets a host sent, and the bytes that it sent and was given."""

    sent: int = 0
    lost: int = 0
    dropped: int = 0
    parted: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


class _Way:
    """One direction of a line: when it is free again."""

    __slots__ = ("free_at", "queue_s", "rate")

    def __init__(self, mbit: float, queue_ms: float) -> None:
        self.rate = mbit * 1e6 / 8.0
        self.queue_s = queue_ms / 1000.0
        self.free_at = 0.0

    def pass_through(self, now: float, size: int) -> float | None:
        """When the packet is through; None when the queue is full."""
        begin = max(now, self.free_at)
        if begin - now > self.queue_s:
            return None
        self.free_at = begin + size / self.rate
        return self.free_at

    def change(self, mbit: float, queue_ms: float) -> None:
        self.rate, self.queue_s = mbit * 1e6 / 8.0, queue_ms / 1000.0


class Wan:
    """Packets among hosts that are named by numbers from 0. Feed it with `offer`, empty it with
    `take`; `due` says when there is something to take."""

    def __init__(self, lines: Sequence[Line], rng: random.Random) -> None:
        self.lines = list(lines)
        self.counts = [Counts() for _ in lines]
        self._up = [_Way(line.up_mbit, line.queue_ms) for line in lines]
        self._down = [_Way(line.down_mbit, line.queue_ms) for line in lines]
        self._side = dict.fromkeys(range(len(lines)), 0)
        self._rng = rng
        self._order = itertools.count()
        self._flying: list[tuple[float, int, int, int, bool, bytes]] = []

    def change(self, host: int, line: Line) -> None:
        """From now on this host has another line; what is under way stays as it is."""
        self.lines[host] = line
        self._up[host].change(line.up_mbit, line.queue_ms)
        self._down[host].change(line.down_mbit, line.queue_ms)

    def split(self, groups: Iterable[Iterable[int]]) -> None:
        """Only hosts of one group hear each other; who is in no group is with the others that are
        in none. No groups: everybody hears everybody."""
        self._side = dict.fromkeys(range(len(self.lines)), 0)
        for side, group in enumerate(groups, 1):
            self._side |= dict.fromkeys(group, side)

    def offer(self, now: float, src: int, dst: int, packet: bytes) -> None:
        """A host sends a packet."""
        count, line = self.counts[src], self.lines[src]
        count.sent += 1
        if self._side[src] != self._side[dst]:
            count.parted += 1
            return
        if self._lost(line) or self._lost(self.lines[dst]):
            count.lost += 1
            return
        through = self._up[src].pass_through(now, len(packet))
        if through is None or len(self._flying) >= IN_FLIGHT_MAX:
            count.dropped += 1
            return
        count.up_bytes += len(packet)
        arrives = through + (line.delay_ms + self.lines[dst].delay_ms) / 1000.0
        heapq.heappush(self._flying, (arrives, next(self._order), src, dst, False, packet))

    def due(self) -> float | None:
        """When `take` has something to do; None when nothing is under way."""
        return self._flying[0][0] if self._flying else None

    def take(self, now: float) -> list[tuple[int, bytes]]:
        """What is delivered by now, as (host, packet) in order."""
        found = []
        while self._flying and self._flying[0][0] <= now:
            at, _, src, dst, received, packet = heapq.heappop(self._flying)
            if received:
                self.counts[dst].down_bytes += len(packet)
                found.append((dst, packet))
                continue
            through = self._down[dst].pass_through(at, len(packet))
            if through is None:
                self.counts[src].dropped += 1
            elif self._side[src] != self._side[dst]:
                self.counts[src].parted += 1
            else:
                row = (through, next(self._order), src, dst, True, packet)
                heapq.heappush(self._flying, row)
        return found

    def _lost(self, line: Line) -> bool:
        return line.loss > 0.0 and self._rng.random() < line.loss


def numbered(names: Mapping[str, int], groups: Iterable[Iterable[str]]) -> list[list[int]]:
    """Groups of names as groups of numbers."""
    return [[names[name] for name in group] for group in groups]
