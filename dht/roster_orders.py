"""What a member of a crowd knows of each other one: a number by slot. 4 bytes a member."""

from __future__ import annotations

from array import array
from typing import Final

from dugnad.dht.roster_rumours import rumour

GROW: Final = 32
"""Slots to begin with; then as many more as there are."""


class Orders:
    """`table` by slot: 0 unknown, even here, odd gone; `count` are here."""

    def __init__(self) -> None:
        self.table = array("I")
        self.count = 0
        self._shown = 0

    def of(self, slot: int) -> int:
        """What is known of a member."""
        return self.table[slot] if slot < len(self.table) else 0

    def here(self, slot: int) -> bool:
        """Whether a member is live."""
        order = self.of(slot)
        return order != 0 and not order & 1

    def take(self, table: array[int], me: int) -> None:
        """A whole table of live members, without ourselves."""
        self.table = table[:]
        if me < len(table):
            self.table[me] = 0
        self.count = len(table) - self.table.count(0)

    def reach(self, slot: int) -> None:
        """Makes room for a slot."""
        lacking = slot + 1 - len(self.table)
        if lacking > 0:
            more = max(lacking, GROW, len(self.table))
            self.table.frombytes(bytes(self.table.itemsize * more))

    def forget(self, slot: int) -> None:
        """Nothing is known of a member any more."""
        if slot < len(self.table):
            self.count -= self.here(slot)
            self.table[slot] = 0

    def live(self) -> list[int]:
        """Rumours of all who are here."""
        return [
            rumour(slot, order) for slot, order in enumerate(self.table) if order and not order & 1
        ]

    def show_from(self, slot: int) -> None:
        """`shown` goes on behind this slot."""
        self._shown = slot

    def shown(self, limit: int) -> tuple[int, ...]:
        """Rumours of the next members that are here, round and round."""
        size, codes = len(self.table), list[int]()
        for _ in range(size):
            if len(codes) >= limit:
                break
            self._shown = (self._shown + 1) % size
            order = self.table[self._shown]
            if order and not order & 1:
                codes.append(rumour(self._shown, order))
        return tuple(codes)
