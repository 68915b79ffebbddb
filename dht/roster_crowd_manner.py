"""How a member of a crowd behaves: its numbers, each with its reason."""

from dataclasses import dataclass, field
from typing import Final

from dugnad.dht.roster_rumours import RUMOURS_MAX

LINKS_MIN: Final = 3
"""Streams that a member sees to itself; with those it accepts about four. Each more costs half of
all rumours once again: with 4 the roster of a swarm in much motion passed 1 kB/s.
"""
LINKS_MAX: Final = 6
"""Streams that it accepts (DESIGN.md section 6)."""
BEAT_S: Final = 2.0
"""A neighbour hears from us at least so often."""
SILENCE_S: Final = 5.0
"""Two beats and a half: one may be late by a retransmission, two may not."""
REDIAL_S: Final = 1.0
"""For the last attempt to reach a neighbour before it is called gone."""
DIAL_S: Final = 5.0
DIALS_MAX: Final = 4
PERIOD_MIN_S: Final = 0.5
PERIOD_MAX_S: Final = BEAT_S
STALE_SHARE: Final = 0.003
"""News is collected for as long as this share of the members changes: a rumour takes two to three
periods to reach all, so views are about 1 % old at worst."""
CATCH_UP_S: Final = 10.0
"""On a new stream each side tells the news of so long: longer than a rumour takes to reach all."""
RECENT_MAX: Final = 512
"""Batches of news that are kept for that: 50 a second."""
QUEUE_MAX: Final = 4 * RUMOURS_MAX
"""Rumours that wait for one neighbour; the oldest go first, `Sync` finds them again."""
SYNC_S: Final = 20.0
SYNC_SIZE: Final = 32
"""Members to compare at once, about 1 kB: 60 B/s."""
SHUFFLE_S: Final = 120.0
RATE_S: Final = 20.0
"""Over this time the rate of rumours is averaged."""
THIN_S: Final = 2.0
"""Between two looks for streams that are too many: what was just told may be on its way."""
HASTE_S: Final = 2.0
"""After word of a loss everybody dials somebody within this time."""
DRAWS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Manner:
    """How a member behaves. The daemon's watches its streams itself (`watches` False)."""

    links_min: int = LINKS_MIN
    links_max: int = LINKS_MAX
    period_min_s: float = PERIOD_MIN_S
    period_max_s: float = PERIOD_MAX_S
    shuffle_s: float = SHUFFLE_S
    """One link is exchanged so often; a member that does not answer the dial is gone."""
    sync_s: float = SYNC_S
    greet_size: int = 0
    """Members shown to each new neighbour: those of a small crowd all at once."""
    watches: bool = True
    """Whether silence and ends of streams are judged here; else by whoever tells of `Lost`."""


USUAL: Final = Manner()


@dataclass(slots=True)
class Link:
    """A stream with a neighbour."""

    outgoing: bool
    heard: float
    sent: float
    extra: bool = False
    """Accepted only to hand over the table."""
    mine: bool = False
    """Dialled or chosen by us: it stays until the other end has no place for it."""
    greeted: bool = False
    queue: dict[int, int] = field(default_factory=dict)
    redial_until: float | None = None
