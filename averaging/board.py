"""The leaderboard as data: what each peer's receipts add up to, in an agreed order.

A board is a function of commits alone: no clock of the reader, no floating-point sums. Recency is
kept in whole days of commit time and weighed with integers, so that equal receipts give equal bytes
on any hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    claimed: int = 0
    """Tokens of the contributions but each fragment's first, whose time nobody knows."""
    span_ms: int = 0
    """Time between a fragment's contributions: with ``claimed`` the speed that receipts imply."""
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

    def add(self, other: Tally) -> None:
        """Add all of ``other``: two machines of one owner."""
        self.work(other)
        self.settle(other.tokens, other.days)
        self.provisional += other.provisional
        self.unwitnessed += other.unwitnessed

    def work(self, other: Tally) -> None:
        """Add the counts and times of ``other``; its tokens are added by whoever judges them."""
        self.twice += other.twice
        self.contributions += other.contributions
        self.units += other.units
        self.claimed += other.claimed
        self.span_ms += other.span_ms
        if other.contributions:
            self.seen(other.first_ms, other.last_ms)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose machine a peer is: the owner's key, and the name that the owner chose ('' for none)."""

    key: PeerId
    name: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a peer's receipts imply and what members timed, in tokens a second (None: nobody could
    say), the ``tokens`` that are not credited for it, and why ('' where nothing is disputed).
    """

    claimed: float = 0.0
    timed: float | None = None
    tokens: int = 0
    reason: str = ""


_NO_CLAIM: Final = Claim()


class BoardRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, or one owner with its machines. Tokens are settled ones; ``share`` is of all
    settled tokens, between 0 and 1.

    ``units`` counts the units that the peer completed, so that they add up to the units covered.
    ``machines`` are the peers that an owner key stands for, best first, with the rank 0; each names
    its ``owner``. A peer without an owner has neither.
    ``disputed`` tokens are not credited, since nobody could show that the peer is as fast as its
    receipts claim; ``dispute`` says why. Speeds are in tokens a second; an owner's row has none.
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
    disputed: int = 0
    dispute: str = ""
    claimed_per_s: float = 0.0
    timed_per_s: float | None = None
    owner: str = ""
    machines: tuple[BoardRow, ...] = ()


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """The leaderboard, with what it was computed from.

    ``as_of_ms`` is the time of the newest settled commit, 0 where nothing is settled. ``versions``
    and ``settled`` hold one number per fragment. Sums: ``tokens`` settled, ``provisional`` not yet,
    ``disputed`` capped away.
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
    disputed: int = 0


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


def make_board(
    totals: Mapping[PeerId, Tally],
    basis: Basis,
    owners: Mapping[PeerId, Owner] | None = None,
    claims: Mapping[PeerId, Claim] | None = None,
) -> Board:
    """The board of ``totals``: recent score first, then tokens, then the key, so never a tie.

    Peers with an entry in ``owners`` stand together in the row of their owner's key. ``totals`` are
    without what ``claims`` say is disputed.
    """
    groups: dict[PeerId, dict[PeerId, Tally]] = {}
    names: dict[PeerId, str] = {}
    for peer in sorted(totals):
        owner = (owners or {}).get(peer)
        key = owner.key if owner is not None else peer
        groups.setdefault(key, {})[peer] = totals[peer]
        if owner is not None:
            names[key] = owner.name
    sums = {key: _sum(group) for key, group in groups.items()}
    tokens = sum(tally.tokens for tally in sums.values())
    make = _Rows(basis, tokens, claims or {})
    rows = [
        make.owner(rank, key, sums[key], names[key], groups[key])
        if key in names
        else make.peer(rank, key, sums[key])
        for rank, key in enumerate(_order(sums, basis), start=1)
    ]
    return Board(
        formula=FORMULA,
        as_of_ms=basis.as_of_ms,
        receipts=basis.receipts,
        refused=basis.refused,
        versions=basis.versions,
        settled=basis.settled,
        tokens=tokens,
        provisional=sum(tally.provisional for tally in sums.values()),
        twice=sum(tally.twice for tally in sums.values()),
        units_covered=sum(tally.units for tally in sums.values()),
        rows=tuple(rows),
        disputed=sum(row.disputed for row in rows),
    )


def machine_rows(board: Board) -> Iterator[BoardRow]:
    """The rows of single peers: those of owners' machines, and of peers without an owner."""
    for row in board.rows:
        yield from row.machines or (row,)


def _order(totals: Mapping[PeerId, Tally], basis: Basis) -> list[PeerId]:
    scores = {peer: recent_score(tally.days, basis.as_of_ms) for peer, tally in totals.items()}
    return sorted(totals, key=lambda peer: (-scores[peer], -totals[peer].tokens, peer))


def _sum(group: Mapping[PeerId, Tally]) -> Tally:
    """The tally of a group; the very one where it is alone, which most are."""
    if len(group) == 1:
        return next(iter(group.values()))
    total = Tally()
    for tally in group.values():
        total.add(tally)
    return total


@dataclass(frozen=True, slots=True)
class _Rows:
    """Makes the rows of one board, of which ``tokens`` are settled in all."""

    basis: Basis
    tokens: int
    claims: Mapping[PeerId, Claim]

    def owner(
        self, rank: int, key: PeerId, total: Tally, name: str, group: Mapping[PeerId, Tally]
    ) -> BoardRow:
        machines = tuple(
            msgspec.structs.replace(self.peer(0, peer, group[peer]), owner=peer_text(key))
            for peer in _order(group, self.basis)
        )
        row = self.peer(rank, key, total)
        disputed = [one for one in machines if one.dispute]
        return msgspec.structs.replace(
            row,
            name=name or row.name,
            machines=machines,
            disputed=sum(one.disputed for one in disputed),
            dispute=f"{disputed[0].name}: {disputed[0].dispute}" if disputed else "",
            claimed_per_s=0.0,
            timed_per_s=None,
        )

    def peer(self, rank: int, peer: PeerId, tally: Tally) -> BoardRow:
        claim = self.claims.get(peer, _NO_CLAIM)
        return BoardRow(
            rank=rank,
            peer=peer_text(peer),
            name="everyone else" if peer == POOL else name_of(peer),
            tokens=tally.tokens,
            share=tally.tokens / self.tokens if self.tokens else 0.0,
            provisional=tally.provisional,
            unwitnessed=tally.unwitnessed,
            twice=tally.twice,
            contributions=tally.contributions,
            units=tally.units,
            recent=recent_score(tally.days, self.basis.as_of_ms),
            first_ms=tally.first_ms,
            last_ms=tally.last_ms,
            disputed=claim.tokens,
            dispute=claim.reason,
            claimed_per_s=claim.claimed,
            timed_per_s=claim.timed,
        )


def board_json(board: Board) -> bytes:
    """The board as JSON: equal boards give equal bytes."""
    return msgspec.json.encode(board)
