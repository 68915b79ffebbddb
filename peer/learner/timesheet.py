"""Where a learner's time goes besides its steps: a core, the times are passed in.

What a step itself takes is measured around it. Between two steps a learner serves the exchange
(copying out, adding in, capturing), does other work that it is asked for (evaluating, a trial),
rests so as to keep to its owner's share, or has too little work to go on. While its owner has
paused it nothing is counted.
"""

from dugnad.peer.learner.protocol import Spent


class Timesheet:
    """Seconds since the last `take`, by what they went into."""

    def __init__(self) -> None:
        self._served = self._asked = self._rested = self._starved = 0.0

    def served(self, seconds: float) -> None:
        """It heard the daemon and did what it said."""
        self._served += seconds

    def asked(self, seconds: float, *, served: bool = False) -> None:
        """It did other work; `served`: in the midst of what `served` is told of, too."""
        self._asked += seconds
        self._served -= seconds if served else 0.0

    def waited(self, since: float, until: float, rest_until: float) -> None:
        """It did nothing, up to `rest_until` for its owner's sake and then for want of work."""
        rested = max(0.0, min(until, rest_until) - since)
        self._rested += rested
        self._starved += max(0.0, until - since - rested)

    def take(self) -> Spent:
        """What has come together; from now on it counts anew."""
        spent = Spent(max(0.0, self._served), self._asked, self._rested, self._starved)
        self._served = self._asked = self._rested = self._starved = 0.0
        return spent
