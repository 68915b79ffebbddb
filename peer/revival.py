"""Whether a learner that died is started again, when, and how small: a core without clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FAILURES_MAX: Final = 5
"""Deaths in a row after which the learner stays down, and the reason is shown."""
HEALTHY_S: Final = 60.0
"""A learner that trained for so long is well: the next death is the first in a row. A single step
would not do: memory often runs out, and drivers often fail, some steps later."""
PAUSE_S: Final = 1.0
"""Before it is started again, times the failures so far but the first: memory may be back then."""


@dataclass(frozen=True, slots=True)
class Again:
    """Start another one after ``after_s`` seconds, with so many sequences at a time."""

    after_s: float
    micro_batch: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It stays down, for this reason, until its owner wants another try."""

    reason: str


class Revival:
    """Counts a learner's deaths in a row."""

    def __init__(self) -> None:
        self.failures = 0
        self._first_step: float | None = None

    def stepped(self, now: float) -> None:
        """The learner has done a step."""
        if self._first_step is None:
            self._first_step = now
        elif now - self._first_step >= HEALTHY_S:
            self.failures = 0

    def died(self, reason: str, micro_batch: int) -> Again | GivenUp:
        """A learner that used ``micro_batch`` sequences at a time died, or could not be started."""
        self.failures += 1
        self._first_step = None
        if self.failures >= FAILURES_MAX:
            return GivenUp(f"the learner died {self.failures} times in a row: {reason}")
        return Again(PAUSE_S * (self.failures - 1), max(1, micro_batch // 2))

    def forgive(self) -> None:
        """Its owner wants it to be tried again."""
        self.failures, self._first_step = 0, None
