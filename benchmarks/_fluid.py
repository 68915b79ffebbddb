"""Lines as pipes that transfers share: each host has one rate up and one down, and every transfer
gets its max-min fair part of the pipes that it goes through. Virtual time; no packets.

A transfer may come from several hosts at once, as a pull does whose donors draw from one pool: it
gets a part of each of their uplinks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

ENOUGH: Final = 1e-6
"""Bytes that are none: sums of floats."""

Pipe = tuple[str, Hashable]
"""('up' or 'down', host)."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way; `rate` is bytes a second as the pipes stand now."""

    sources: tuple[Hashable, ...]
    target: Hashable
    size: float
    then: Callable[[], None]
    began: float
    left: float = 0.0
    rate: float = 0.0
    alone: bool = True
    """Whether nothing else has gone out of its first source's line meanwhile."""
    filled: bool = False
    """Whether that line was full."""


@dataclass(slots=True)
class Fluid:
    """All lines, and what is under way on them."""

    clock: Callable[[], float]
    later: Callable[[float, Callable[[], None]], None]
    pipes: dict[Pipe, float] = field(default_factory=dict)
    """Bytes a second."""
    under_way: list[Transfer] = field(default_factory=list)
    full: set[Pipe] = field(default_factory=set)
    """Pipes of which nothing is free now."""
    arrived: dict[Hashable, float] = field(default_factory=dict)
    """Bytes that each host has got so far."""
    _since: float = 0.0
    _plan: int = 0

    def line(self, host: Hashable, up: float, down: float) -> None:
        """From now on a host has this line, bytes a second."""
        self._flow()
        self.pipes["up", host], self.pipes["down", host] = up, down
        self._share()

    def start(self, transfer: Transfer) -> None:
        """Send; `then` is called when all of it is there."""
        self._flow()
        transfer.left = transfer.size
        self.under_way.append(transfer)
        self._share()

    def cancel(self, transfer: Transfer) -> None:
        """Send no more of it."""
        if transfer in self.under_way:
            self._flow()
            self.under_way.remove(transfer)
            self._share()

    def _flow(self) -> None:
        """Take note of what came through since the last change."""
        now = self.clock()
        for one in self.under_way:
            came = one.rate * (now - self._since)
            one.left -= came
            self.arrived[one.target] = self.arrived.get(one.target, 0.0) + came
        self._since = now

    def _share(self) -> None:
        """Rates by progressive filling, and the next moment at which one is through."""
        for one in self.under_way:
            one.rate = 0.0
            if len(self.under_way) > 1:
                first = one.sources[0]
                one.alone = one.alone and not any(
                    first in other.sources for other in self.under_way if other is not one
                )
        parts: list[tuple[Transfer, Pipe, Pipe]] = [
            (one, ("up", source), ("down", one.target))
            for one in self.under_way
            for source in one.sources
        ]
        free = dict(self.pipes)
        self.full = set()
        while parts:
            users: dict[Pipe, int] = {}
            for _, up, down in parts:
                users[up], users[down] = users.get(up, 0) + 1, users.get(down, 0) + 1
            each = min(free[pipe] / count for pipe, count in users.items())
            for one, _, _ in parts:
                one.rate += each
            for pipe, count in users.items():
                free[pipe] -= each * count
                if free[pipe] <= self.pipes[pipe] * 1e-9:
                    self.full.add(pipe)
            parts = [one for one in parts if one[1] not in self.full and one[2] not in self.full]
        for one in self.under_way:
            one.filled = one.filled or ("up", one.sources[0]) in self.full
        self._wake()

    def _wake(self) -> None:
        self._plan += 1
        if not self.under_way:
            return
        plan = self._plan
        wait = min(max(0.0, one.left) / one.rate for one in self.under_way)
        self.later(wait, lambda: self._through(plan))

    def _through(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._flow()
        done = [one for one in self.under_way if one.left <= max(ENOUGH, one.rate * 1e-9)]
        for one in done:
            self.under_way.remove(one)
        self._share()
        for one in done:
            one.then()
