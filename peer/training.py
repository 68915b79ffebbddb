"""The learner's shell: gives it work, keeps account of what it did, starts it again when it dies.

Joins three things: the trainer (the process), the units core (what to train) and the progress log
(what is not handed in yet). To the averager it is the learner: copy out, add in, account for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from dugnad.averaging.formats import UnitPiece
from dugnad.averaging.speed import speed_class
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import Progress
from dugnad.peer.context import Beginning, Context, Found, begin
from dugnad.peer.exchangeports import LearnerAway
from dugnad.peer.learner.process import Exited, LearnerEvent, LearnerGone
from dugnad.peer.learner.protocol import Captured, Failed, Idle, Ready, Spent, Step, Work
from dugnad.peer.pace import Pace
from dugnad.peer.progress import ProgressLog, coalesced
from dugnad.peer.revival import Again, GivenUp, Revival
from dugnad.peer.store import StoreError
from dugnad.peer.trainer import Continuation, LearnerPlan, Trainer
from dugnad.peer.unitplan import Unit
from dugnad.peer.units import (
    Abandoned,
    Claim,
    Returned,
    TookOver,
    Trained,
    Units,
    WorkItem,
)

AHEAD_STEPS: Final = 3
"""Steps of work that the learner has in hand: it never waits for us, and little is lost with it."""
AHEAD_S: Final = 1.0
"""Or as many as take this long: tiny models do hundreds of steps a second."""
WAITING_TIMES: Final = 4
"""So many times of that may wait for its text: what nobody can give does not stop what comes."""
LOSS_SHARE: Final = 0.05
"""Weight of the newest step in the shown training loss."""
IDLE_RETRY_S: Final = 1.0
"""A learner that could get no work is looked after again this much later."""


@dataclass(frozen=True, slots=True)
class TrainingHooks:
    """Whom the training shell tells. None of them may block."""

    on_ready: Callable[[bool], None]
    on_claim: Callable[[Claim], None]
    on_note: Callable[[str, str], None]
    swarm_tokens: Callable[[], int]
    on_failed: Callable[[str], None]
    """The learner died too often in a row and stays down."""
    still: Callable[[], AbstractAsyncContextManager[None]]
    """While inside, no fragment moves progress."""
    find: Callable[[], Awaitable[Found]]
    """While nothing moves: what a new learner begins with."""
    has: Callable[[Unit], bool] = lambda unit: True
    """Whether the text of a unit is here; one that is not is then fetched, and `arrived` said."""


class Training:
    """One peer's learner over its whole life. Belongs to one event loop."""

    def __init__(
        self,
        plan: LearnerPlan,
        units: Units,
        log: ProgressLog,
        clock: Callable[[], float],
        hooks: TrainingHooks,
        *,
        eligible: bool,
    ) -> None:
        self.trainer = Trainer(plan, self._heard)
        self.units = units
        self.log = log
        self.clock = clock
        self.hooks = hooks
        self.eligible = eligible
        self.ready: Ready | None = None
        self.enabled = False
        self.held = False
        self.stopping = False
        self.fault = ""
        self.revival = Revival()
        self.steps = 0
        self.tokens = 0
        self.step_s = 0.0
        """Seconds that steps took, of all learners so far."""
        self.spent = Spent()
        """And what their time went into between steps."""
        self.loss: float | None = None
        self.idle = False
        self.own_class: int | None = None
        self._pace = Pace(clock())
        self._pending: dict[int, Vector] = {}
        self.waiting: list[WorkItem] = []
        """Work for the learner whose text is not here yet."""
        self._starting = False
        self._begun = False
        self._before: Sequence[UnitPiece] = ()
        self._task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None

    @property
    def tokens_per_s(self) -> float:
        """How fast it trains; 0 while nothing is known."""
        return self._pace.tokens_per_s

    def times(self) -> dict[str, float]:
        """What the learner's time went into, in seconds."""
        spent = msgspec.structs.asdict(self.spent)
        return {"steps": self.step_s, **spent}

    @property
    def trains(self) -> bool:
        """Whether its learner is one that can train."""
        return not self.trainer.plan.forward_only

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Start the learner from its context, or from the references. Raises LearnerGone or OSError
        when it cannot."""
        try:
            ready = await self.trainer.start(*await self._begin())
            while self._pending:
                fragment, delta = self._pending.popitem()
                await self.trainer.add_in(fragment, delta)
        finally:
            self._starting = False
        self.ready = ready
        self._keep_held()
        self._estimate(ready)
        self.hooks.on_ready(self.trains)
        self._top_up()
        return ready

    def enable(self) -> None:
        """From now on there is work to give (the anchors are those of the swarm)."""
        self.enabled = True
        self._pace.begin(self.clock(), self.tokens)
        self._top_up()

    def disable(self) -> None:
        """Give no more work; what the learner has in hand it finishes."""
        self.enabled = False

    def hold(self) -> None:
        """Train no further than the step under way, until `release`; copying and adding go on."""
        self.held = True
        with contextlib.suppress(LearnerGone):
            self.trainer.pause()

    def release(self) -> None:
        """Undo `hold`."""
        self.held = False
        with contextlib.suppress(LearnerGone):
            self.trainer.resume()
        self._pace.begin(self.clock(), self.tokens)
        self._top_up()

    async def unload(self) -> None:
        """End the learner and give its memory back, until `revive`. What was not captured and not
        handed in is lost."""
        if self.ready is None:
            return
        self.ready = None
        self.hooks.on_ready(False)
        await self.trainer.stop()

    def revive(self) -> None:
        """Forget the deaths, and start a learner that stays down again."""
        self.revival.forgive()
        self.fault = ""
        if self.ready is None and not self._starting and (self._task is None or self._task.done()):
            restart = self._restart(Again(0.0, self.trainer.plan.micro_batch))
            self._task = asyncio.get_running_loop().create_task(restart, name="revive")

    def shrink(self) -> int:
        """Use half as many sequences at a time, to need less memory; the number, 0: no fewer
        can be."""
        known = self.trainer.plan.micro_batch or (self.ready.micro_batch if self.ready else 1)
        if self.ready is None or known <= 1:
            return 0
        self.trainer.shrink(known // 2)
        return known // 2

    async def stop(self) -> None:
        """End the learner for good."""
        self.stopping = True
        self.enabled = False
        if self._retry is not None:
            self._retry.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.trainer.stop()
        self.trainer.close()

    def trained_before(self, pieces: Sequence[UnitPiece]) -> None:
        """Before the start: these pieces are in contributions of an earlier daemon's learner."""
        self._before = pieces

    async def _begin(self) -> tuple[Vector, Continuation | None]:
        """Parameters and state to start with; what is not in them is given up to be redone."""
        async with self.hooks.still():
            self._starting = True
            self._pending.clear()
            self.waiting.clear()
            found = await self.hooks.find()
            if not self.trains:
                return flat(list(found.refs)), None
            table = self.trainer.plan.table
            if found.context is None:
                beginning = Beginning(flat(list(found.refs)), ())
            else:
                beginning = await asyncio.to_thread(
                    begin, found.context, table, found.refs, found.marks
                )
            self._account(found.context, beginning.counts)
        return beginning.theta, found.going_on

    def _account(self, context: Context | None, counts: tuple[bool, ...]) -> None:
        """Bring the log of work in line with the parameters that the new learner begins with."""
        now, step = self.clock(), context.step if context is not None else 0
        if self._begun:
            newest = self.trainer.step
            lost = (*self.units.outstanding(), *self.log.abandon(step, counts))
            self.units.handle(Abandoned(lost), now)
            if context is not None:
                text = f"it goes on from its state after step {step} of {newest}"
                self.hooks.on_note("learner", text)
            return
        self._begun = True
        stays = list(self._before)
        if context is not None:
            self.trainer.step = step
            stays += self.log.take_up(context.work.steps, context.work.places, counts, step)
            kept = f"{sum(counts)} of {len(counts)} fragments go on where they were"
            self.hooks.on_note("context", f"taken up after step {step}; {kept}")
        for piece in coalesced(stays):
            self.units.handle(Trained(piece), now)

    # -- what the averager asks ----------------------------------------------------------------

    async def copy_out(self, fragment: int) -> tuple[Vector, int]:
        """The fragment's parameters after a step, and that step. Raises LearnerAway."""
        if self.ready is None or self._starting or not self.trains:
            raise LearnerAway
        try:
            result = await self.trainer.copy_out(fragment)
        except LearnerGone as error:
            raise LearnerAway from error
        return result.theta, result.step

    async def capture(self) -> Captured:
        """Copy the learner's whole state to shared memory, after a step. Raises LearnerAway."""
        if self.ready is None or self._starting or not self.trains:
            raise LearnerAway
        try:
            return await self.trainer.capture()
        except LearnerGone as error:
            raise LearnerAway from error

    async def add_in(self, fragment: int, delta: Vector) -> None:
        """Add to the fragment's parameters; kept for a learner that is just starting."""
        if not self.trains:
            raise LearnerAway
        if self._starting:
            known = self._pending.get(fragment)
            self._pending[fragment] = delta if known is None else known + delta
            return
        if self.ready is None:
            raise LearnerAway
        try:
            await self.trainer.add_in(fragment, delta)
        except LearnerGone as error:
            raise LearnerAway from error

    def progress(self, fragment: int, seq: int, step: int) -> Progress | None:
        """The work behind contribution ``seq``, copied out after ``step``."""
        own = self.own_class if self.own_class is not None else 0
        return self.log.take(fragment, seq, step, speed_class=own, eligible=self.eligible)

    def taken_back(self, fragment: int, seq: int) -> None:
        """A contribution was a draft and is made again."""
        self.log.take_back(fragment, seq)

    def settled(self, fragment: int, seq: int, share: float) -> None:
        """What became of a contribution's work."""
        back = self.log.settled(fragment, seq, share)
        if back:
            self.units.handle(Returned(back), self.clock())

    def forgotten(self, fragment: int, seq: int) -> None:
        """A contribution is settled for good."""
        self.log.forget(fragment, seq)

    # -- what the learner says -----------------------------------------------------------------

    def _heard(self, event: LearnerEvent) -> None:
        match event:
            case Step():
                self._stepped(event)
            case Idle():
                self.idle = True
                self._top_up()
            case Failed(reason):
                self.fault = reason
                self.hooks.on_note("learner", f"the learner reports: {reason}")
            case Exited():
                self._exited(event)

    def _stepped(self, event: Step) -> None:
        self.idle = False
        self.spent += event.spent
        pieces = tuple(UnitPiece(p.epoch, p.index, p.start, p.stop) for p in event.pieces)
        if event.skipped:
            self.hooks.on_note("learner", "a step was skipped: its gradient was not finite")
            self.units.handle(Abandoned(pieces), self.clock())
            self._top_up()
            return
        self.revival.stepped(self.clock())
        self.fault = ""
        self.steps += 1
        self.step_s += event.seconds
        self.tokens += event.tokens
        known = self.loss
        self.loss = event.loss if known is None else known + LOSS_SHARE * (event.loss - known)
        self.log.trained(event.step, pieces)
        now = self.clock()
        for piece in pieces:
            self.units.handle(Trained(piece), now)
        if self._pace.count(now, self.tokens):
            self.own_class = speed_class(self.tokens_per_s, self.own_class)
        self._top_up()

    def _estimate(self, ready: Ready) -> None:
        plan = self.trainer.plan
        if plan.forward_only:
            return
        share = plan.cpu_share if ready.device == "cpu" else plan.gpu_share
        self._pace.estimate(ready.tokens_per_s, share)
        self.own_class = speed_class(self.tokens_per_s, self.own_class)
        self._pace.begin(self.clock(), self.tokens)

    def _exited(self, event: Exited) -> None:
        was_ready = self.ready is not None
        self.ready = None
        self.hooks.on_ready(False)
        if self.stopping or not was_ready:
            return
        again = self._after_death(event.reason)
        if again is None:
            return
        self.hooks.on_note("learner", f"the learner died and is restarted: {event.reason}")
        restart = self._restart(again)
        self._task = asyncio.get_running_loop().create_task(restart, name="restart learner")

    def _after_death(self, reason: str) -> Again | None:
        """Count a death; how to go on, or None when it was one too many, which is said."""
        plan = self.trainer.plan
        known = self.ready.micro_batch if self.ready is not None else 0
        used = plan.micro_batch or known or plan.optimiser.batch_sequences
        match self.revival.died(reason, used):
            case Again() as again:
                return again
            case GivenUp(why):
                self.fault = why
                self.hooks.on_note("learner", why)
                self.hooks.on_failed(why)
        return None

    def _keep_held(self) -> None:
        """A new learner rests, too, while it is held."""
        if self.held:
            self.trainer.pause()

    async def _restart(self, again: Again) -> None:
        """Start it again with smaller micro-batches, and again, until it trains or has failed too
        often."""
        await asyncio.sleep(again.after_s)
        while not await self._restarted(again.micro_batch):
            following = self._after_death(self.fault)
            if following is None:
                return
            again = following
            await asyncio.sleep(again.after_s)
        self.hooks.on_ready(self.trains)
        self._top_up()

    async def _restarted(self, micro_batch: int) -> bool:
        try:
            await self.trainer.stop()
            try:
                theta, going_on = await self._begin()
                self.ready = await self.trainer.restart(theta, micro_batch, going_on)
            finally:
                self._starting = False
            for fragment in sorted(self._pending):
                await self.trainer.add_in(fragment, self._pending.pop(fragment))
            self._keep_held()
        except (LearnerGone, OSError, TimeoutError, StoreError) as error:
            self.fault = f"the learner cannot be restarted: {error}"
            self.hooks.on_note("learner", self.fault)
            return False
        self.fault = ""
        return True

    # -- work ----------------------------------------------------------------------------------

    def took_over(self, actions: list[Claim | TookOver]) -> None:
        """What the units core wants told; and new work may have come with it."""
        for action in actions:
            if isinstance(action, Claim):
                self.hooks.on_claim(action)
        self._top_up()

    def _top_up(self) -> None:
        """See to it that the learner has a few steps of work in hand."""
        if not (self.enabled and self.trains) or self.held or self.ready is None or self._starting:
            return
        self._give_waiting()
        ahead = self._ahead()
        wanted = ahead - self.trainer.outstanding
        waiting = sum(item.stop - item.start for item in self.waiting)
        if wanted <= 0 or waiting >= WAITING_TIMES * ahead:
            return
        items, actions = self.units.next_work(wanted, self.clock())
        for action in actions:
            if isinstance(action, Claim):
                self.hooks.on_claim(action)
        for item in items:
            self._give(item)
        if not items and not self.trainer.outstanding and self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(IDLE_RETRY_S, self._try_again)

    def _give(self, item: WorkItem) -> None:
        """To the learner, once its text is here."""
        if not self.hooks.has((item.epoch, item.index)):
            self.waiting.append(item)
            return
        tokens = self.hooks.swarm_tokens()
        work = Work(item.epoch, item.index, item.start, list(item.sequences), tokens)
        try:
            self.trainer.give(work)
        except LearnerGone:
            self.units.handle(Abandoned((item.piece,)), self.clock())

    def _give_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        for item in waiting:
            self._give(item)

    def arrived(self) -> None:
        """Text that was wanted is here."""
        self._top_up()

    def _try_again(self) -> None:
        self._retry = None
        self._top_up()

    def _ahead(self) -> int:
        """Sequences that the learner should have outstanding."""
        plan = self.trainer.plan
        batch = plan.optimiser.batch_sequences
        second = int(self.tokens_per_s * AHEAD_S / plan.config.context)
        return max(AHEAD_STEPS * batch, second)


def flat(parts: list[Vector]) -> Vector:
    """All fragments' vectors as one."""
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
