"""Evaluating as a duty: keeps the agreed parameters of each round, has held-out units scored by the
learner, and spreads and collects the scores (`evaluation` is the core)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from dugnad.averaging import events as ev
from dugnad.averaging.formats import SCORES_MAX, Scores
from dugnad.averaging.tree import Vector
from dugnad.dht.allowance import Allowance
from dugnad.dht.ids import PeerId, name_of, peer_text
from dugnad.dht.records import RecordError, verify_ed25519
from dugnad.peer import clock
from dugnad.peer.duty import others_with
from dugnad.peer.evaluation import (
    Action,
    Drop,
    Evaluation,
    Evaluators,
    Keep,
    Memory,
    Publish,
    Reached,
    Scored,
)
from dugnad.peer.exchangeports import LearnerAway
from dugnad.peer.keeping import keep, recall
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.roles import EVALUATE
from dugnad.peer.scores import HeldOut, Score, read_score, signed

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

LOOK_S: Final = 0.5
"""Between two looks for a task, when there was none."""
TRAINING_SHARE: Final = 0.1
"""Of its time that a peer evaluates that trains, too: training stands still meanwhile."""
ROUNDS_HELD: Final = 2
"""Rounds whose agreed parameters are held: the one that is scored and the one that comes together;
a round of which a head was skipped never does."""
SAVE_S: Final = 60.0
KEY: Final = "evaluation"
MEMORY_BYTES_MAX: Final = 1 << 20
"""A thousand points and a thousand peers have 100 KB."""
RATE_SCORES: Final = 128
RATE_S: Final = 10.0
"""Scores that one peer may send in so many seconds: two rounds; more are not looked at."""


class Evaluator:
    """The evaluations of one daemon. Belongs to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        data = daemon.manifest.data
        held = HeldOut(data.held_out_start, data.sequences - data.held_out_start, data.context)
        fragments = len(daemon.manifest.table.fragments)
        self.held = held
        self.core = Evaluation(daemon.identity.peer, daemon.run_id, fragments, held)
        self.tokens = 0
        """Held-out tokens that this daemon scored since it started."""
        self._kept: dict[int, dict[int, Vector]] = {}
        self._heard = Allowance(RATE_SCORES, RATE_S)

    # -- what happens --------------------------------------------------------------------------

    def adopted(self, p: int, action: ev.Adopt, total: int) -> None:
        """A fragment has a new head."""
        self._do_all(self.core.handle(Reached(p, action.version, action.digest, total)))

    def peers_changed(self) -> None:
        """Somebody came, went, or does something else now."""
        found = others_with(EVALUATE, self.daemon)
        if EVALUATE in self.daemon.duty.advertised():
            found.append(self.daemon.identity.peer)
        self.core.handle(Evaluators(tuple(sorted(found))))

    def met(self, peer: PeerId) -> None:
        """Tell somebody who has just come what I scored."""
        rows = [signed(one, self.daemon.run_id, self.daemon.identity) for one in self._own()]
        if rows:
            self.daemon.swarm.send(peer, Scores(tuple(rows)))

    def _own(self) -> list[Score]:
        return self.core.own(SCORES_MAX)

    def heard(self, sender: PeerId, message: Scores) -> bool:
        """Scores from a peer, its own or others'; whether all were taken."""
        now = clock.now()
        for row in message.rows:
            if not self._heard.take(sender, now):
                return False
            try:
                score = read_score(row, self.daemon.run_id, verify_ed25519)
            except RecordError as error:
                self.daemon.happenings.refused(sender, error.reason)
                return False
            self.core.hear(score)
        return True

    def gone(self, peer: PeerId) -> None:
        """A peer is lost or left."""
        self._heard.forget(peer)
        self.peers_changed()

    # -- what is to be done --------------------------------------------------------------------

    def _do_all(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Keep(version, fragment, digest):
                    worker = self.daemon.averager.fragments[fragment].worker
                    if (state := worker.states.get(digest)) is not None:
                        self._kept.setdefault(version, {})[fragment] = state.theta
                    while len(self._kept) > ROUNDS_HELD:
                        del self._kept[min(self._kept)]
                case Drop(below):
                    for version in [one for one in self._kept if one < below]:
                        del self._kept[version]
                case Publish(score):
                    row = signed(score, self.daemon.run_id, self.daemon.identity)
                    self.daemon.relay.say(Scores((row,)))

    async def run(self) -> None:
        """Score what is mine, whenever its owner lets it, until cancelled."""
        await self._restore()
        self.peers_changed()
        saved = clock.now()
        while True:
            await self.daemon.steward.free.wait()
            spent = await self._score_one()
            if clock.now() - saved >= SAVE_S:
                saved = clock.now()
                await self.save()
            await asyncio.sleep(spent * (1.0 / TRAINING_SHARE - 1.0) if spent else LOOK_S)

    async def _score_one(self) -> float:
        """Score the next unit; seconds that training stood still for it, 0 when it did not."""
        training = self.daemon.training
        whole = self.daemon.larder.whole.is_set()
        if training.ready is None or not whole or (task := self.core.next_task()) is None:
            return 0.0
        parts = self._kept.get(task.version, {})
        if len(parts) < len(self.daemon.averager.fragments):
            return 0.0  # a head that was skipped over: the next round will be whole
        anchors = np.concatenate([parts[p] for p in range(len(parts))])
        began = clock.now()
        try:
            loss = await training.trainer.evaluate(anchors, self.held.sequences(task.unit))
        except (LearnerGone, LearnerAway):
            return 0.0
        self.tokens += self.held.tokens
        self._do_all(self.core.handle(Scored(task, loss)))
        return clock.now() - began if training.trains else 0.001

    # -- disk ----------------------------------------------------------------------------------

    async def _restore(self) -> None:
        memory = await recall(self.daemon, KEY, Memory, MEMORY_BYTES_MAX, "what others scored")
        if memory is not None:
            self.core.restore(memory)

    async def save(self) -> None:
        """Write down the curve and what was earned."""
        await keep(self.daemon, KEY, self.core.memory())

    # -- what people see -----------------------------------------------------------------------

    def view(self) -> Mapping[str, object]:
        """The validation curve and what evaluators earned, as the control API answers it."""
        return {
            "round_tokens": self.held.units * self.held.tokens,
            "evaluating": EVALUATE in self.daemon.duty.duties,
            "tokens_here": self.tokens,
            "curve": [
                {"version": one.version, "tokens": one.total, "loss": one.loss}
                | {"units": one.units, "of": self.held.units, "evaluators": one.peers}
                for one in self.core.curve()
            ],
            "earned": [
                {
                    "name": name_of(PeerId(one.peer)),
                    "peer": peer_text(PeerId(one.peer)),
                    "evaluated_tokens": one.confirmed,
                    "pending": one.pending,
                    "disputed": one.disputed,
                }
                for one in self.core.earned()
            ],
        }
