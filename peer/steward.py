"""Sees to it that the daemon does what its owner wants, within the limits they set.

Joins two cores with the daemon: the life (`lifecycle`: what a person asked for) and the rules
(`limits`: what the machine allows). It trains only when both say yes; `state` says in one line why
not.
"""

from __future__ import annotations

import asyncio
import datetime
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dugnad.averaging.codecs import CODECS
from dugnad.peer import clock
from dugnad.peer.errors import UserError
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.lifecycle import Effect, Input, Life, State
from dugnad.peer.limits import ALLOWED, QUOTA_DAYS, Verdict, judge
from dugnad.peer.ratelimit import BYTES_PER_MBIT
from dugnad.peer.readings import Reader
from dugnad.peer.savedlife import load_life, load_usage, save_life, save_usage

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon
    from dugnad.peer.manifest import Manifest

LOOK_S: Final = 2.0
"""Between two looks at the machine: a battery, a game or a person is noticed within this."""
WIRE_SHARE: Final = 1.055
"""Bytes on a line for each that we move: headers of TCP, IP and TLS, and acknowledgements. A peer
that counted 0.948 of what its line carried was measured (`benchmarks/limits.py`); whoever sells
the line counts them, too."""
SAVE_S: Final = 60.0
"""Traffic is written down this often; a crash forgets at most a minute of it."""
FINISH_S: Final = 120.0
"""A learner that does not get done with the work in hand is not waited for longer."""
SHRINK_S: Final = 30.0
"""After a shrink, memory has this long to come back before the next one."""


class Steward:
    """One daemon's owner, in code. Belongs to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.limits = daemon.settings.limits()
        self.life = load_life(daemon.home)
        self.usage = load_usage(daemon.home)
        self.verdict = ALLOWED
        self.free = asyncio.Event()
        """Set while it may train: nothing is fetched and no learner started before."""
        self._reader = Reader(daemon.home.root, self.limits)
        self._wakes = asyncio.Event()
        self._looked = False
        self._saved_at = clock.now()
        self._finish_by = 0.0
        self._shrunk_at = -SHRINK_S

    @property
    def rests(self) -> bool:
        """Whether something that its owner decides stands against working."""
        return self._looked and not self.free.is_set()

    # -- what people and parts say -------------------------------------------------------------

    def say(self, given: Input, *, until_ms: int = 0, cause: str = "") -> str:
        """Take an input and do what follows; the answer to whoever asked."""
        before = self.life.state
        effects, said = self.life.handle(given, until_ms=until_ms, cause=cause)
        for effect in effects:
            self._do(effect)
        self._settle()
        if self.life.state is not before and self.life.state is not State.ENDED:
            self.daemon.note("life", f"{before} → {self.life.state}: {given}")
        self._wakes.set()
        return said

    def _do(self, effect: Effect) -> None:
        daemon = self.daemon
        match effect:
            case Effect.LAST_WORK:
                self._finish_by = clock.now() + FINISH_S
                daemon.training.disable()
            case Effect.MORE_WORK:
                if daemon.vitals.synced and not daemon.vitals.end.over():
                    daemon.training.enable()
            case Effect.REVIVE:
                if daemon.duty.learns:
                    daemon.training.revive()
            case Effect.DRAIN:
                daemon.drain = True
            case Effect.HAND_IN:
                daemon.leaving.set()
            case Effect.GO:
                daemon.forced = True
                daemon.averager.handed_over.set()
            case Effect.REMEMBER:
                try:
                    save_life(daemon.home, self.life)
                except UserError as error:
                    daemon.note("disk", f"{error.sentence}; {error.fix}")
            case Effect.HOLD | Effect.RELEASE:
                pass  # `_settle` does it, since the limits have a say

    def _settle(self) -> None:
        """Let the learner train, or hold it, as person and limits want."""
        training = self.daemon.training
        may = self._looked and self.life.trains and self.verdict.allowed
        if may and not self.free.is_set():
            self.free.set()
            training.release()
        elif not may and (self.free.is_set() or not training.held):
            self.free.clear()
            training.hold()

    def fail(self, why: str) -> None:
        """The learner died too often."""
        self.say(Input.FAIL, cause=why)

    # -- what the machine says -----------------------------------------------------------------

    async def run(self) -> None:
        """Look at machine and clock, until the end of this life or cancelled."""
        while self.life.state is not State.ENDED:
            await self._look()
            self._wakes.clear()
            with suppress(TimeoutError):  # not wait_for: in 3.11 it can swallow a cancellation
                async with asyncio.timeout(LOOK_S):
                    await self._wakes.wait()

    async def _look(self) -> None:
        now_ms = clock.wall_ms()
        self._count_traffic(now_ms)
        if self.life.due(now_ms):
            self.say(Input.WAKE)
        ready = self.daemon.training.ready
        readings = await asyncio.to_thread(
            self._reader.read,
            traffic=self.usage.within(QUOTA_DAYS, now_ms),
            leave_bytes=leave_bytes(self.daemon.manifest),
            trains_on_gpu=ready is not None and ready.device != "cpu",
        )
        verdict = self._judged(judge(self.limits, readings, self.verdict))
        if verdict.reason and verdict.rule != self.verdict.rule:
            self.daemon.note("limit", verdict.reason)
        elif self.verdict.reason and verdict.allowed:
            self.daemon.note("limit", f"{self.verdict.rule} allows it again")
        self.verdict, self._looked = verdict, True
        self._settle()
        if self.life.state is State.FINISHING and self._work_done():
            self.say(Input.WORK_DONE)

    def _judged(self, verdict: Verdict) -> Verdict:
        """Two rules are not kept by pausing: memory by smaller steps, traffic by leaving."""
        if verdict.rule == "quota_gb" and self.life.stays:
            self.daemon.failure = UserError(
                "E033", verdict.reason, "raise quota_gb, or start again in some days"
            )
            self.say(Input.LEAVE)  # not FINISH: work in hand goes on moving bytes for minutes
            return verdict
        if verdict.rule != "memory_mb" or not self.life.trains:
            return verdict
        training, now = self.daemon.training, clock.now()
        if training.ready is None or now - self._shrunk_at < SHRINK_S:
            return ALLOWED
        self._shrunk_at = now
        with suppress(LearnerGone):
            if smaller := training.shrink():
                self.daemon.note("limit", f"{verdict.reason}; {smaller} sequences at a time now")
                return ALLOWED
        self.say(Input.FAIL, cause=verdict.reason)
        self.daemon.own(training.unload(), "unload the learner")
        return verdict

    def _work_done(self) -> bool:
        training = self.daemon.training
        busy = training.ready is not None and training.trainer.outstanding and self.free.is_set()
        return not busy or clock.now() > self._finish_by

    def _count_traffic(self, now_ms: int) -> None:
        traffic, messenger = self.daemon.swarm.traffic, self.daemon.swarm.messenger
        total = traffic.sent + traffic.received
        if messenger is not None:
            total += messenger.counts.sent_bytes + messenger.counts.received_bytes
        self.usage.count(round(total * WIRE_SHARE), now_ms)
        if clock.now() - self._saved_at >= SAVE_S:
            self._saved_at = clock.now()
            self.save_traffic()

    def quota_left(self) -> float:
        """Bytes that may still go up and down this month; infinite without a quota."""
        if not self.limits.quota_gb:
            return math.inf
        self._count_traffic(clock.wall_ms())
        used = self.usage.within(QUOTA_DAYS, clock.wall_ms())
        return max(0.0, self.limits.quota_gb * 1e9 - used)

    def save_traffic(self) -> None:
        """Write down what was moved; a full disk loses the count, not the daemon."""
        with suppress(UserError):
            save_usage(self.daemon.home, self.usage)

    def limit_rates(self) -> None:
        """Before the first byte: as fast as the owner lets it."""
        settings, traffic = self.daemon.settings, self.daemon.swarm.traffic
        traffic.up.rate = settings.upload_mbit * BYTES_PER_MBIT
        traffic.down.rate = settings.download_mbit * BYTES_PER_MBIT
        used = self.usage.within(QUOTA_DAYS, clock.wall_ms())
        if self.limits.quota_gb and used >= self.limits.quota_gb * 1e9:
            raise UserError(
                "E033",
                f"{used / 1e9:,.1f} GB of quota_gb = {self.limits.quota_gb:g} went up and down in"
                f" {QUOTA_DAYS} days",
                "raise quota_gb, or start again in some days",
            )

    # -- what people see -----------------------------------------------------------------------

    def reason(self) -> str:
        """Why it does not train, of what an owner decides: a rule's name and its value; '' when
        nothing of that kind stands against it."""
        return reason_of(self.life, self.verdict)


def leave_bytes(manifest: Manifest) -> int:
    """What a peer that leaves still moves: one hand-in of everything in the run's codec, and as
    much again for the commit that comes meanwhile."""
    codec = CODECS[manifest.exchange.hand_in_codec]
    return 2 * sum(codec.encoded_size(size) for size in manifest.table.sizes)


def reason_of(life: Life, verdict: Verdict) -> str:
    """The line that command line, API and page show: the person's word first, then the limits."""
    match life.state:
        case State.PAUSED:
            return "pause = on: its owner paused it; `dugnad resume` goes on"
        case State.SNOOZED:
            until = datetime.datetime.fromtimestamp(life.until_ms / 1000)
            return f"snooze = until {until:%a %d %b %H:%M}: its owner let it rest"
        case State.FAILED:
            return f"failures: {life.cause}; `dugnad resume` tries again"
    return "" if verdict.allowed else verdict.reason
