"""What members say about the speed of a peer that they timed: a signed verdict (DESIGN.md 11).

An examiner gives a peer a seeded piece of training from the agreed parameters, times the answer,
and recomputes a part of it. Its verdict is one word among several: the board takes
the middle one, so that a minority of liars moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

from dugnad.dht.ids import KEY_BYTES, PeerId, RunId
from dugnad.dht.records import (
    SIGNATURE_BYTES,
    Signer,
    Verifier,
    encode,
    framed,
    verify_ed25519,
)

VERDICT_BYTES_MAX: Final = 256
"""An encoded verdict: two keys, a signature and three short fields."""
KEPT_PER_PEER: Final = 5
"""Newest verdicts of different examiners that are kept about a peer: the middle of five stands
against two liars."""
SPEED_MAX: Final = 1 << 52
"""Thousandths of a token a second: far above any machine."""
_DOMAIN: Final = "verdict/1"

Outcome = Literal["proven", "wrong", "silent"]
"""proven: answered in time, and what was recomputed agreed. wrong: it did not. silent: nothing
came in time, again and again, although the peer's receipts went on."""

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Verdict(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="v"):
    """`examiner` timed `peer`: `speed` in thousandths of a token a second. 0 for a wrong answer;
    for none, the highest speed at which the smallest trial would have taken as long as was waited.

    `number` is the examiner's wall clock in milliseconds; its newest verdict about a peer counts.
    """

    examiner: _Key
    peer: _Key
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    outcome: Outcome
    speed: Annotated[int, msgspec.Meta(ge=0, le=SPEED_MAX)] = 0
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    @property
    def order(self) -> tuple[int, bytes]:
        """Which of two verdicts of one examiner about one peer counts: the greater."""
        return (self.number, encode(self))


def sign_verdict(verdict: Verdict, run: RunId, signer: Signer) -> Verdict:
    """The verdict with its examiner's signature."""
    return msgspec.structs.replace(verdict, signature=signer.sign(_signed(verdict, run)))


def verdict_fault(verdict: Verdict, run: RunId, verifier: Verifier = verify_ed25519) -> str:
    """Why a verdict says nothing, or ''."""
    if verdict.examiner == verdict.peer:
        return "a verdict of a peer about itself"
    if (verdict.outcome == "wrong") != (verdict.speed == 0):
        return "a verdict whose speed and outcome do not fit"
    if not verifier(PeerId(verdict.examiner), _signed(verdict, run), verdict.signature):
        return "a verdict that its examiner has not signed"
    return ""


def by_peer(verdicts: Iterable[Verdict]) -> dict[PeerId, tuple[Verdict, ...]]:
    """The verdicts about each peer, in the order of their examiners."""
    found: dict[PeerId, list[Verdict]] = {}
    for one in verdicts:
        found.setdefault(PeerId(one.peer), []).append(one)
    return {peer: tuple(sorted(rows, key=lambda v: v.examiner)) for peer, rows in found.items()}


def _signed(verdict: Verdict, run: RunId) -> bytes:
    return framed(_DOMAIN, run, encode(msgspec.structs.replace(verdict, signature=b"")))
