"""Being examined: which challenges to take up. A pure core.

At most one trial at a time, and a small share of a slot in all: whoever sends more gets an excuse.
Only members that the mark chose are answered, so that nobody can pick its own examiner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.examiner import ATTEMPTS_MAX, trial_seconds
from dugnad.averaging.trial import (
    FIRST_EXAMINERS,
    SLOT_MS,
    Challenge,
    Mark,
    TrialRules,
    examiners,
)
from dugnad.dht.ids import PeerId

SHARE_MAX: Final = 0.02
"""Of a slot's time that trials may take: twelve seconds of ten minutes, six times what is usual. On
a machine that needs longer for a single one, as many trials as a newcomer has examiners."""
LONG_S: Final = 30.0
"""One trial longer than this is refused: its examiner does not wait so long either."""
NEWCOMER: Final = -1
"""Stands for the slot whose beginning a newcomer has not seen."""


@dataclass(slots=True)
class Examinee:
    """The trials that one peer takes up."""

    me: PeerId
    rules: TrialRules
    busy: bool = False
    slot: int = NEWCOMER
    spent_s: float = 0.0
    """Seconds of trials in this slot, as they were expected."""
    asked: dict[PeerId, int] = field(default_factory=dict)
    """Challenges in this slot, by examiner: the chosen ones, so at most FIRST_EXAMINERS."""

    def judge(
        self, examiner: PeerId, challenge: Challenge, mark: Mark | None, tokens_per_s: float
    ) -> str:
        """Why a challenge is not taken up, or ''; then `done` must follow. `mark` is that of this
        peer's lineage, `tokens_per_s` its own measured speed.
        """
        if mark is not None and mark.digest != challenge.mark:
            return "another commit marks the slot here"
        if not self._chosen(examiner, mark):
            return "the slot's mark chose other members"
        if self.busy:
            return "another trial is under way"
        slot = mark.slot if mark is not None else NEWCOMER
        if slot != self.slot:
            self.slot, self.spent_s = slot, 0.0
            self.asked.clear()
        seconds = trial_seconds(challenge, tokens_per_s, self.rules)
        if challenge.batch > self.rules.batch or seconds > LONG_S:
            return "the trial is too long for this peer"
        taken = self.asked.get(examiner, 0)
        budget_s = max(SHARE_MAX * SLOT_MS / 1000, FIRST_EXAMINERS * seconds)
        if taken >= ATTEMPTS_MAX or self.spent_s + seconds > budget_s:
            return "enough trials in this slot"
        self.asked[examiner] = taken + 1
        self.spent_s += seconds
        self.busy = True
        return ""

    def _chosen(self, examiner: PeerId, mark: Mark | None) -> bool:
        """A newcomer that does not know the slot's mark takes the first few that ask."""
        if mark is None:
            return examiner in self.asked or len(self.asked) < FIRST_EXAMINERS
        return examiner in examiners(self.rules.run, mark, self.me, FIRST_EXAMINERS)

    def done(self) -> None:
        """The trial that was taken up is over."""
        self.busy = False
