"""The timed challenge (DESIGN.md section 11): what is asked, what is answered, who may ask.

A trial is a number of short *chains* of training, each from the agreed parameters with a fresh
optimizer, on sequences that follow from a seed. The prover has to compute all of them, since it
does not know which ones its examiner will compute again; the examiner computes a few. So checking
costs a part of proving. What a chain comes to (its last loss and the norm of the last gradient)
cannot be known without its forward and backward passes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import encode, framed

SEED_BYTES: Final = 16
STEPS: Final = 2
"""Optimizer steps of a chain: the second one's loss and gradient depend on the whole first step."""
CHAINS_MAX: Final = 64
CHAINS_MIN: Final = 2
BATCH_MAX: Final = 4096
"""Sequences of one step, far above any inner batch that fits a learner."""
HEADS_MAX: Final = 4096
"""Fragments of a model, as in ``formats``."""
TRIAL_S: Final = 1.0
"""A trial takes about so long at the speed that the peer claims: long beside the way there and
back, short beside the ten minutes between two trials."""
SLOT_MS: Final = 600_000
"""In each slot of ten minutes of commit time, a peer is examined by EXAMINERS members: 0.3 % of its
time. The first commit of a slot (its *mark*) decides whom by: nobody knows it beforehand."""
EXAMINERS: Final = 2
FIRST_EXAMINERS: Final = 4
"""For a peer of whom too few verdicts are known: one more than are needed."""
LOSS_TOLERANCE: Final = 0.005
"""Relative. Measured on a small model (16 chains; version 0 and after 150 and 400 steps): bfloat16
differs from float32 by at most 0.0007, other micro-batches by 3e-7, and other chains by 5 to 7 %
(0.3 % at version 0)."""
NORM_TOLERANCE: Final = 0.05
"""Relative, of the gradient's norm: bfloat16 at most 0.03; other chains 11 to 43 %."""
_REASON_CHARS_MAX: Final = 100

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Seed = Annotated[bytes, msgspec.Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]


class Challenge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="x"):
    """The sender wants the receiver timed: `chains` of steps of `batch` sequences. `mark` is the
    commit that chose the sender."""

    mark: _Digest
    seed: Seed
    chains: Annotated[int, msgspec.Meta(ge=1, le=CHAINS_MAX)]
    batch: Annotated[int, msgspec.Meta(ge=1, le=BATCH_MAX)]


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="y"):
    """What the chains of the trial `seed` came to, (loss, norm) each, from the anchors after the
    commits `heads` (one per fragment). With an `excuse` there is none, and why.
    """

    seed: Seed
    heads: Annotated[tuple[_Digest, ...], msgspec.Meta(max_length=HEADS_MAX)] = ()
    values: Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=CHAINS_MAX)] = ()
    excuse: Annotated[str, msgspec.Meta(max_length=_REASON_CHARS_MAX)] = ""


Values = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class TrialRules:
    """What the manifest says about a trial: `batch` sequences a step, of `context` tokens, from the
    first `sequences` (those that are trained on).
    """

    run: RunId
    batch: int
    context: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The first commit of fragment 0 in a slot, and the members at the head: a newcomer may examine
    before the next slot, and two peers hardly differ in them."""

    digest: bytes
    slot: int
    members: frozenset[PeerId]


def tokens_of(challenge: Challenge, rules: TrialRules) -> int:
    """Tokens that are trained on in a trial."""
    return challenge.chains * STEPS * challenge.batch * rules.context


def sized(mark: bytes, seed: bytes, tokens_per_s: float, rules: TrialRules) -> Challenge:
    """A trial of about TRIAL_S at that speed: the batch is the learner's, smaller where two chains
    would take too long.
    """
    sequences = max(1.0, min(tokens_per_s, 1e15) * TRIAL_S / (STEPS * rules.context))
    batch = int(max(1, min(rules.batch, BATCH_MAX, sequences / CHAINS_MIN)))
    chains = int(max(CHAINS_MIN, min(CHAINS_MAX, sequences / batch)))
    return Challenge(mark, seed, chains, batch)


def work_of(challenge: Challenge, rules: TrialRules) -> tuple[tuple[int, ...], ...]:
    """The sequences of each chain, its steps one after the other; the same for everybody."""
    count = STEPS * challenge.batch
    chains = []
    for chain in range(challenge.chains):
        body = encode((challenge.seed, challenge.chains, challenge.batch, chain))
        stream = hashlib.shake_256(framed("trial/1", rules.run, body)).digest(8 * count)
        numbers = (stream[8 * n : 8 * n + 8] for n in range(count))
        chains.append(tuple(int.from_bytes(one, "big") % rules.sequences for one in numbers))
    return tuple(chains)


def agree(own: tuple[float, float], told: tuple[float, float]) -> bool:
    """Whether what was computed again is what was told; false for what is not finite."""
    pairs = zip(own, told, (LOSS_TOLERANCE, NORM_TOLERANCE), strict=True)
    return all(
        math.isfinite(a) and math.isfinite(b) and abs(a - b) <= part * max(abs(a), 1e-9)
        for a, b, part in pairs
    )


def slot_of(time_ms: int) -> int:
    """The slot of a commit's time."""
    return time_ms // SLOT_MS


def examiners(run: RunId, mark: Mark, peer: PeerId, count: int) -> list[PeerId]:
    """The members that a mark chooses to examine a peer: the first by a hash."""

    def key(member: PeerId) -> bytes:
        body = encode((mark.digest, peer, member))
        return hashlib.sha256(framed("examiner/1", run, body)).digest()

    return sorted(mark.members - {peer}, key=key)[:count]


def mark_in(
    chain: Iterable[tuple[bytes, int]], members: frozenset[PeerId], *, complete: bool
) -> Mark | None:
    """The mark of the newest slot in a lineage, given newest first as (digest, time in ms) without
    version 0, down to version 1 if it is `complete`; None where the slot's beginning is not known.
    """
    newest: Mark | None = None
    for digest, time_ms in chain:
        slot = slot_of(time_ms)
        if newest is not None and slot != newest.slot:
            return newest
        newest = Mark(digest, slot, members)
    return newest if complete else None
