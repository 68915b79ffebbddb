"""Claims that nobody could prove: credit is capped at the speed that others have timed.

A peer's receipts imply a speed: the tokens of its contributions over the time between them. Where
that is well above what its examiners timed, or above the middle of the timed peers while it was not
timed itself, only that much is credited and the rest is *disputed*, with the reason. The cap looks
at the whole past, so a proof that comes later restores what it proves, and verdicts in any order
give the same board. All of it in whole numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.board import POOL, Claim, Owner, Tally
from dugnad.averaging.verdicts import Outcome, Verdict
from dugnad.dht.ids import PeerId

ROOM_NUMERATOR: Final = 3
ROOM_DENOMINATOR: Final = 2
"""A claim is disputed when it is over half as much again as what was timed: less can be a machine
that was busy for the second in which it was timed."""
VERDICTS_MIN: Final = 3
"""Verdicts that time a peer, or as many as there are others on the board: of two that differ nobody
knows which is false."""
FEW: Final = 2
"""Verdicts that count for something where VERDICTS_MIN cannot be had, if all of them are proofs."""
CLAIM_MS_MIN: Final = 60_000
"""Receipts of less time imply no speed: one late listing would be a tenfold claim."""
_WORDS: Final[Mapping[Outcome, str]] = {
    "proven": "timed it",
    "wrong": "got wrong answers",
    "silent": "got none in time",
}
_PER_S: Final = 1_000_000
"""Thousandths of a token a second, times milliseconds, are so many in a token."""


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of peers, besides receipts: whose machines they are, and how fast."""

    owners: Mapping[PeerId, Owner] = field(default_factory=dict)
    verdicts: Mapping[PeerId, Sequence[Verdict]] = field(default_factory=dict)


def judged(
    totals: Mapping[PeerId, Tally], verdicts: Mapping[PeerId, Sequence[Verdict]]
) -> tuple[dict[PeerId, Tally], dict[PeerId, Claim]]:
    """The tallies with disputed credit taken off, and each peer's claim.

    Only verdicts of peers with receipts count. Nobody is capped before anybody was timed. Who was
    not timed by enough counts as the middle of the timed, or as what two or more proved if that is
    more.
    """
    workers = {peer for peer, tally in totals.items() if tally.contributions and peer != POOL}
    needed = max(1, min(VERDICTS_MIN, len(workers) - 1))
    heard = {
        peer: [
            v for v in verdicts.get(peer, ()) if PeerId(v.examiner) in workers and v.peer == peer
        ]
        for peer in workers
    }
    timed = {
        peer: _middle([v.speed for v in rows])
        for peer, rows in heard.items()
        if len(rows) >= needed
    }
    proven = [speed for speed in timed.values() if speed]
    others = _middle(proven) if proven else None
    fair, claims = dict(totals), dict[PeerId, Claim]()
    for peer in workers:
        cap = timed.get(peer, others)
        if peer not in timed and cap is not None:
            cap = max(cap, _least(heard[peer]))
        known = timed[peer] / 1000 if peer in timed else None
        claim = Claim(_claimed(totals[peer]), known)
        if cap is not None and _beyond(totals[peer], cap):
            fair[peer], tokens = _capped(totals[peer], cap)
            reason = _reason(claim, heard[peer], cap / 1000)
            claim = Claim(claim.claimed, known, tokens, reason)
        claims[peer] = claim
    return fair, claims


def _middle(speeds: Sequence[int]) -> int:
    """The higher one of two in the middle: where half of them lie, nobody loses credit by it."""
    return sorted(speeds)[len(speeds) // 2]


def _least(verdicts: Sequence[Verdict]) -> int:
    """What several proved although they are too few: in a small swarm there may be no others."""
    proven = [one.speed for one in verdicts if one.outcome == "proven"]
    return min(proven) if len(proven) >= FEW and len(proven) == len(verdicts) else 0


def _claimed(tally: Tally) -> float:
    return 1000 * tally.claimed / tally.span_ms if tally.span_ms >= CLAIM_MS_MIN else 0.0


def _beyond(tally: Tally, speed: int) -> bool:
    """Whether the receipts imply clearly more than `speed` (thousandths of a token a second)."""
    if tally.span_ms < CLAIM_MS_MIN:
        return False
    allowed = speed * tally.span_ms * ROOM_NUMERATOR
    return tally.claimed * _PER_S * ROOM_DENOMINATOR > allowed


def _capped(tally: Tally, speed: int) -> tuple[Tally, int]:
    """The tally with the share of its credit that `speed` allows, and the tokens taken off."""
    allowed, claimed = speed * tally.span_ms, tally.claimed * _PER_S

    def part(tokens: int) -> int:
        return tokens * allowed // claimed

    fair = Tally()
    fair.work(tally)
    fair.settle(part(tally.tokens), {day: part(n) for day, n in tally.days.items()})
    fair.provisional, fair.unwitnessed = part(tally.provisional), part(tally.unwitnessed)
    return fair, tally.tokens + tally.provisional - fair.tokens - fair.provisional


def _reason(claim: Claim, verdicts: Sequence[Verdict], cap: float) -> str:
    says = f"its receipts claim {claim.claimed:.3g} tokens/s"
    if claim.timed is None:
        return f"{says}; not timed by enough members yet, it counts as {cap:.3g}"
    outcomes = Counter(v.outcome for v in verdicts)
    told = ", ".join(
        f"{outcomes[name]} {words}" for name, words in _WORDS.items() if outcomes[name]
    )
    return f"{says}; of {len(verdicts)} members that challenged it {told}: at most {cap:.3g}"
