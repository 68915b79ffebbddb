"""Examining others: whom to time now, what came of it, and what to say about it. A pure core.

One trial at a time, and each peer once in a slot: idle, asked (until an answer or the deadline),
checking (a few chains are computed again), idle. An answer that is right proves its speed; the best
of a day counts, since a machine may be busy for a second. Silence slot after slot, while the peer's
receipts go on, shows that it is no faster than the smallest trial in the time that was waited.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.trial import (
    EXAMINERS,
    FIRST_EXAMINERS,
    SEED_BYTES,
    Answer,
    Challenge,
    Mark,
    TrialRules,
    Values,
    agree,
    examiners,
    sized,
    tokens_of,
)
from dugnad.averaging.verdicts import SPEED_MAX, Outcome
from dugnad.dht.ids import PeerId

CHECKED: Final = 2
"""Chains computed again, of up to 64: who leaves out half of them is found out by three of four
examiners, and each finds it anew in each slot."""
DEADLINE_S: Final = 30.0
"""For an answer: thirty times what the peer claims to need. Who claimed more than that gets a
smaller trial next time."""
CHECK_S: Final = 120.0
"""For computing two chains again: a learner may be loading."""
SMALLER: Final = 8.0
"""A trial that was not answered is followed by one for a speed that much lower ..."""
SMALLEST: Final = 8
"""... up to eight times: 16 million times lower."""
ATTEMPTS_MAX: Final = 3
"""Trials of a peer in one slot."""
RETRY_S: Final = 20.0
"""After a trial that said nothing: whoever else examines the peer is done by then."""
SILENT_MIN: Final = 2
"""Slots in a row in which no trial was answered, after which that is said: in one, a machine may be
busy with others' trials."""
BEST_MS: Final = 86_400_000
"""An earlier, better proof counts for a day."""
COST_S: Final = 5.0
"""A peer whose smallest trial takes longer than this is examined in fewer slots, accordingly."""
PEERS_MAX: Final = 1024
"""Peers remembered: those of a large swarm that this one was chosen for lately."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A live peer as the examiner's shell sees it: the speed it claims, how many verdicts are known
    about it, and the commit time of its newest receipt.
    """

    peer: PeerId
    tokens_per_s: float
    verdicts: int
    listed_ms: int


@dataclass(frozen=True, slots=True)
class Look:
    """Event: time to see whether somebody is to be examined."""

    wall_ms: int
    mark: Mark | None
    subjects: Sequence[Subject]
    needed: int
    """Verdicts with which a peer counts as timed."""


@dataclass(frozen=True, slots=True)
class AnswerIn:
    """Event: a peer answered a trial."""

    peer: PeerId
    answer: Answer


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Event: what this peer's own learner made of the chains asked for; None when it could not."""

    values: Values | None


Event = Look | AnswerIn | Recomputed


@dataclass(frozen=True, slots=True)
class Ask:
    """Action: send the challenge."""

    peer: PeerId
    challenge: Challenge


@dataclass(frozen=True, slots=True)
class Recompute:
    """Action: train these chains of the challenge from the anchors after `heads`, and say."""

    challenge: Challenge
    heads: tuple[bytes, ...]
    chains: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """Action: sign and spread a verdict; `speed` in thousandths of a token a second."""

    peer: PeerId
    outcome: Outcome
    speed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Missed:
    """Action: tell a person that a trial said nothing, and why."""

    peer: PeerId
    reason: str


Action = Ask | Recompute | Say | Missed


@dataclass(slots=True)
class _Known:
    """What is remembered about one peer."""

    slot: int = -1
    """The slot in which it was examined last, and how often."""
    attempts: int = 0
    not_before: float = 0.0
    missed: int = 0
    """Trials in a row without an answer, and since when; ``silent``: slots full of them."""
    missed_since_ms: int = 0
    silent: int = 0
    best: int = 0
    best_ms: int = 0


@dataclass(slots=True)
class _Trial:
    """The one trial under way."""

    subject: Subject
    challenge: Challenge
    slot: int
    sent: float
    wall_ms: int
    took: float = 0.0
    answer: Answer | None = None
    chains: tuple[int, ...] = ()


@dataclass(slots=True)
class Examiner:
    """The trials that one peer gives to others. `rng` draws seeds and what is checked."""

    me: PeerId
    rules: TrialRules
    rng: random.Random
    known: dict[PeerId, _Known] = field(default_factory=dict)
    trial: _Trial | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event at `now` (seconds); what is to be done."""
        match event:
            case Look():
                return self._expired(now) or self._look(event, now)
            case AnswerIn(peer, answer):
                return self._answered(peer, answer, now)
            case Recomputed(values):
                return self._checked(values)

    def _expired(self, now: float) -> list[Action]:
        trial = self.trial
        if trial is None:
            return []
        if trial.answer is None and now - trial.sent > DEADLINE_S:
            return self._unanswered(trial, now, f"no answer within {DEADLINE_S:.0f} s")
        if trial.answer is not None and now - trial.sent > DEADLINE_S + CHECK_S:
            self.trial = None
            return [Missed(trial.subject.peer, "it could not be computed again in time")]
        return []

    def _look(self, look: Look, now: float) -> list[Action]:
        if self.trial is not None or look.mark is None:
            return []
        for subject in sorted(look.subjects, key=lambda one: (one.verdicts, one.peer)):
            known = self.known.setdefault(subject.peer, _Known())
            if self._due(subject, known, look, now):
                return self._ask(subject, known, look, now)
        while len(self.known) > PEERS_MAX:
            del self.known[next(iter(self.known))]
        return []

    def _due(self, subject: Subject, known: _Known, look: Look, now: float) -> bool:
        mark = look.mark
        assert mark is not None, "looked at only with a mark"
        count = EXAMINERS if subject.verdicts >= look.needed else FIRST_EXAMINERS
        if self.me not in examiners(self.rules.run, mark, subject.peer, count):
            return False
        if known.slot == mark.slot:
            return known.attempts < ATTEMPTS_MAX and now >= known.not_before
        least = sized(mark.digest, bytes(SEED_BYTES), subject.tokens_per_s, self.rules)
        cost_s = tokens_of(least, self.rules) / max(subject.tokens_per_s, 1e-6)
        every = max(1, round(min(cost_s / COST_S, 1e6)))
        return mark.slot % every == subject.peer[0] % every

    def _ask(self, subject: Subject, known: _Known, look: Look, now: float) -> list[Action]:
        mark = look.mark
        assert mark is not None, "asked only with a mark"
        known.attempts = known.attempts + 1 if known.slot == mark.slot else 1
        known.slot = mark.slot
        speed = subject.tokens_per_s / SMALLER ** min(known.missed, SMALLEST)
        challenge = sized(mark.digest, self.rng.randbytes(SEED_BYTES), speed, self.rules)
        self.trial = _Trial(subject, challenge, mark.slot, now, look.wall_ms)
        return [Ask(subject.peer, challenge)]

    def _answered(self, peer: PeerId, answer: Answer, now: float) -> list[Action]:
        trial = self.trial
        if trial is None or trial.answer is not None or trial.subject.peer != peer:
            return []
        if answer.seed != trial.challenge.seed:
            return []  # late, of a trial that is over
        if answer.excuse:
            return self._unanswered(trial, now, answer.excuse)
        known = self.known[peer]
        known.missed = known.silent = 0
        if len(answer.values) != trial.challenge.chains:
            return self._end(trial, "wrong", 0, "it answered another number of chains")
        trial.answer, trial.took = answer, max(now - trial.sent, 1e-3)
        count = min(CHECKED, trial.challenge.chains)
        trial.chains = tuple(sorted(self.rng.sample(range(trial.challenge.chains), count)))
        return [Recompute(trial.challenge, answer.heads, trial.chains)]

    def _checked(self, values: Values | None) -> list[Action]:
        trial = self.trial
        if trial is None or trial.answer is None:
            return []
        known = self.known[trial.subject.peer]
        if values is None or len(values) != len(trial.chains):
            known.not_before = trial.sent + trial.took + RETRY_S
            self.trial = None
            return [Missed(trial.subject.peer, "it could not be computed again here")]
        told = [trial.answer.values[chain] for chain in trial.chains]
        if not all(agree(own, other) for own, other in zip(values, told, strict=True)):
            return self._end(trial, "wrong", 0, "what was computed again came to something else")
        measured = round(1000 * tokens_of(trial.challenge, self.rules) / trial.took)
        measured = max(1, min(measured, SPEED_MAX))
        if measured >= known.best or trial.wall_ms - known.best_ms > BEST_MS:
            known.best, known.best_ms = measured, trial.wall_ms
        return self._end(trial, "proven", known.best, f"{measured / 1000:.3g} tokens/s")

    def _unanswered(self, trial: _Trial, now: float, reason: str) -> list[Action]:
        known = self.known[trial.subject.peer]
        known.not_before = now + RETRY_S
        if not known.missed:
            known.missed_since_ms = trial.wall_ms
        known.missed += 1
        known.silent += known.attempts == ATTEMPTS_MAX
        self.trial = None
        if known.silent < SILENT_MIN or trial.subject.listed_ms <= known.missed_since_ms:
            # it may be paused, or gone: then no receipt of it is listed either
            return [Missed(trial.subject.peer, reason)]
        most = round(1000 * tokens_of(trial.challenge, self.rules) / DEADLINE_S)
        return self._end(
            trial, "silent", max(1, most), f"{known.missed} trials without an answer in time"
        )

    def _end(self, trial: _Trial, outcome: Outcome, speed: int, reason: str) -> list[Action]:
        known = self.known[trial.subject.peer]
        known.attempts = ATTEMPTS_MAX
        if outcome == "wrong":
            known.best = 0
        self.trial = None
        return [Say(trial.subject.peer, outcome, speed, reason)]


def trial_seconds(challenge: Challenge, tokens_per_s: float, rules: TrialRules) -> float:
    """How long a trial takes at a speed; endless at none."""
    return tokens_of(challenge, rules) / tokens_per_s if tokens_per_s > 0.0 else float("inf")
