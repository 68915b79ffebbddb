"""The leaderboard as data: what each peer's receipts add up to, in an agreed order.

A board is a function of commits alone: no clock of the reader, no floating-point sums. Recency is
kept in whole days of commit time and weighed with integers, so that equal receipts give equal bytes
on any hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dugnad.dht.ids import PeerId, name_of, peer_text

FORMULA: Final = "credit/1"
"""Name of the rule: one token of credit for each token of a sequence that a settled, witnessed
commit covers first, in the fragment that its unit hashes to. Never changed, only succeeded."""

DAY_MS: Final = 86_400_000
HALF_LIFE_DAYS: Final = 7
"""A token of today counts twice as much in ``recent`` as one of a week ago, so that newcomers can
rise while lifetime totals stay visible (volunteers.md 1.4)."""
RECENT_DAYS: Final = 70
"""Ten half-lives: older tokens weigh less than a thousandth and are dropped from ``recent``."""
WEIGHT_BITS: Final = 32
WEIGHTS: Final = (
    4294967296,
    3890053517,
    3523313525,
    3191148436,
    2890298655,
    2617811889,
    2371014176,
)
"""2**32 * 2**(-k/7) for k days, rounded down; older days are shifted right by whole weeks."""

POOL: Final = PeerId(bytes(32))
"""Row of the peers beyond the number that a fragment keeps apart; no key has this value."""


@dataclass(slots=True)
class Tally:
    """What a peer has earned. ``days`` maps days of commit time to settled tokens.

    ``provisional`` includes ``unwitnessed``: tokens that only their own home has confirmed so far.
    """

    tokens: int = 0
    provisional: int = 0
    unwitnessed: int = 0
    twice: int = 0
    contributions: int = 0
    units: int = 0
    first_ms: int = 0
    last_ms: int = 0
    days: dict[int, int] = field(default_factory=dict)

    def seen(self, first_ms: int, last_ms: int) -> None:
        """Widen the time in which the peer contributed."""
        self.first_ms = min(self.first_ms or first_ms, first_ms)
        self.last_ms = max(self.last_ms, last_ms)

    def settle(self, tokens: int, days: Mapping[int, int]) -> None:
        """Add settled tokens and the days on which they were merged."""
        self.tokens += tokens
        for day, amount in days.items():
            self.days[day] = self.days.get(day, 0) + amount

    def work(self, other: Tally) -> None:
        """Add the counts and times of ``other``; its tokens are added by whoever judges them."""
        self.twice += other.twice
        self.contributions += other.contributions
        self.units += other.units
        if other.contributions:
            self.seen(other.first_ms, other.last_ms)


class BoardRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer. Tokens are settled ones; ``share`` is of all settled tokens, between 0 and 1.

    ``units`` counts the units that the peer completed, so that they add up to the units covered.
    """

    rank: int
    peer: str
    name: str
    tokens: int
    share: float
    provisional: int
    unwitnessed: int
    twice: int
    contributions: int
    units: int
    recent: int
    first_ms: int
    last_ms: int


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """The leaderboard, with what it was computed from.

    ``as_of_ms`` is the time of the newest settled commit, 0 where nothing is settled. ``versions``
    and ``settled`` hold one number per fragment. Sums: ``tokens`` settled, ``provisional`` not yet.
    """

    formula: str
    as_of_ms: int
    receipts: int
    refused: int
    versions: tuple[int, ...]
    settled: tuple[int, ...]
    tokens: int
    provisional: int
    twice: int
    units_covered: int
    rows: tuple[BoardRow, ...]


@dataclass(frozen=True, slots=True)
class Basis:
    """What a board rests on: see the fields of :class:`Board` with the same names."""

    as_of_ms: int
    receipts: int
    refused: int
    versions: tuple[int, ...]
    settled: tuple[int, ...]


def recent_score(days: Mapping[int, int], as_of_ms: int) -> int:
    """Tokens weighed by their age at ``as_of_ms``, halved every week; an integer on purpose."""
    today = as_of_ms // DAY_MS
    total = 0
    for day, tokens in days.items():
        weeks, rest = divmod(max(today - day, 0), HALF_LIFE_DAYS)
        if weeks * HALF_LIFE_DAYS + rest <= RECENT_DAYS:
            total += tokens * (WEIGHTS[rest] >> weeks)
    return total >> WEIGHT_BITS


def make_board(totals: Mapping[PeerId, Tally], basis: Basis) -> Board:
    """The board of ``totals``: recent score first, then tokens, then the key, so never a tie."""
    scores = {peer: recent_score(tally.days, basis.as_of_ms) for peer, tally in totals.items()}
    order = sorted(totals, key=lambda peer: (-scores[peer], -totals[peer].tokens, peer))
    tokens = sum(tally.tokens for tally in totals.values())
    return Board(
        formula=FORMULA,
        as_of_ms=basis.as_of_ms,
        receipts=basis.receipts,
        refused=basis.refused,
        versions=basis.versions,
        settled=basis.settled,
        tokens=tokens,
        provisional=sum(tally.provisional for tally in totals.values()),
        twice=sum(tally.twice for tally in totals.values()),
        units_covered=sum(tally.units for tally in totals.values()),
        rows=tuple(
            _row(rank, peer, totals[peer], (scores[peer], tokens))
            for rank, peer in enumerate(order, start=1)
        ),
    )


def _row(rank: int, peer: PeerId, tally: Tally, score_and_sum: tuple[int, int]) -> BoardRow:
    score, tokens = score_and_sum
    return BoardRow(
        rank=rank,
        peer=peer_text(peer),
        name="everyone else" if peer == POOL else name_of(peer),
        tokens=tally.tokens,
        share=tally.tokens / tokens if tokens else 0.0,
        provisional=tally.provisional,
        unwitnessed=tally.unwitnessed,
        twice=tally.twice,
        contributions=tally.contributions,
        units=tally.units,
        recent=score,
        first_ms=tally.first_ms,
        last_ms=tally.last_ms,
    )


def board_json(board: Board) -> bytes:
    """The board as JSON: equal boards give equal bytes."""
    return msgspec.json.encode(board)
