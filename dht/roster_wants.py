"""Which adverts are asked of which neighbour: one request at a time each, all bounded."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dugnad.dht.messages import PEERS_KNOWN_MAX, TAG_BYTES

WANTED_MAX: Final = 4096
"""Adverts wanted of one neighbour: as many as there may be members."""
ANSWER_S: Final = 5.0
"""An answer is up to 64 kB on a line that others use, too."""


@dataclass(slots=True)
class _Asked:
    waiting: dict[bytes, bool] = field(default_factory=dict)
    asked: dict[bytes, bool] = field(default_factory=dict)
    until: float | None = None


class Wants:
    """By neighbour (slot). A tag is the start of a key; its flag: whether it is news to spread."""

    def __init__(self) -> None:
        self._links: dict[int, _Asked] = {}
        self._under_way: set[bytes] = set()

    def want(self, slot: int, tag: bytes, *, news: bool) -> None:
        """A neighbour has an advert that we lack."""
        link = self._links.setdefault(slot, _Asked())
        if tag not in self._under_way and len(link.waiting) < WANTED_MAX:
            link.waiting[tag] = link.waiting.get(tag, False) or news

    def request(self, slot: int, now: float) -> bytes:
        """The tags to ask for next; b'' when nothing is wanted, or an answer is under way."""
        link = self._links.get(slot)
        if link is None or link.until is not None or not link.waiting:
            return b""
        chosen = [tag for tag in link.waiting if tag not in self._under_way][:PEERS_KNOWN_MAX]
        link.asked = {tag: link.waiting[tag] for tag in chosen}
        link.waiting = {t: f for t, f in link.waiting.items() if t not in link.asked}
        if not chosen:
            link.waiting.clear()  # all of it is on its way from others
            return b""
        link.until = now + ANSWER_S
        self._under_way.update(chosen)
        return b"".join(chosen)

    def answered(self, slot: int) -> dict[bytes, bool]:
        """What a neighbour's answer is about; the next may be asked."""
        link = self._links.get(slot)
        if link is None:
            return {}
        asked, link.asked, link.until = link.asked, {}, None
        self._under_way.difference_update(asked)
        return asked

    def keep(self, slots: set[int], now: float) -> None:
        """Forgets neighbours that are none any more, and answers that did not come."""
        for slot in list(self._links):
            link = self._links[slot]
            if slot not in slots or (link.until is not None and link.until <= now):
                self.answered(slot)
            if slot not in slots:
                del self._links[slot]

    def deadlines(self) -> Iterator[float]:
        """When `keep` has something to do."""
        for link in self._links.values():
            if link.until is not None:
                yield link.until


def tags_of(data: bytes) -> list[bytes]:
    """The single tags of a request."""
    return [data[at : at + TAG_BYTES] for at in range(0, len(data), TAG_BYTES)]
