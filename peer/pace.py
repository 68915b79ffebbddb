"""How fast this machine trains the run's model: an estimate first, then what it really does.

The learner's probe runs at full speed, but its owner may lend a tenth of the processor. Shares of
work follow the speed, so a figure ten times too high would draw ten times the work until it fades:
the estimate is scaled by the share, and the first real measurement replaces it altogether.
"""

from typing import Final

FIRST_WINDOW_S: Final = 2.0
"""The first measurement is wanted soon: until it is there others share the work by an estimate."""
WINDOW_S: Final = 5.0
"""Speed is measured over this long; shorter windows follow every hiccup."""
NEWEST_SHARE: Final = 0.3
"""Weight of the newest window in the moving average."""


class Pace:
    """The speed in tokens a second; 0 while nothing is known. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.tokens_per_s = 0.0
        self._measured = False
        self._since, self._tokens = now, 0

    def estimate(self, tokens_per_s: float, share: float) -> None:
        """A probe at full speed found this, and training may use `share` of the time."""
        if not self._measured:
            self.tokens_per_s = tokens_per_s * share

    def begin(self, now: float, tokens: int) -> None:
        """Training (re)starts after a rest, with so many tokens trained before."""
        self._since, self._tokens = now, tokens

    def count(self, now: float, tokens: int) -> bool:
        """So many tokens are trained in all; whether the speed was measured anew by it."""
        passed = now - self._since
        if passed < (WINDOW_S if self._measured else FIRST_WINDOW_S):
            return False
        found = (tokens - self._tokens) / passed
        known = self.tokens_per_s if self._measured else found
        self.tokens_per_s = known + NEWEST_SHARE * (found - known)
        self._measured = True
        self.begin(now, tokens)
        return True
