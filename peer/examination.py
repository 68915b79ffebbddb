"""The timed challenge in a daemon: whom to examine, being examined, and saying what came of it.

The rules are in :mod:`dugnad.averaging.examiner` and :mod:`dugnad.averaging.examinee`; here their
trials are sent, trained and signed. The learner does a trial chain by chain beside its own work and
within its owner's shares; a paused one does none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import psutil

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.dispute import VERDICTS_MIN
from dugnad.averaging.examinee import Examinee
from dugnad.averaging.examiner import (
    Action,
    AnswerIn,
    Ask,
    Event,
    Examiner,
    Look,
    Missed,
    Recompute,
    Recomputed,
    Say,
    Subject,
)
from dugnad.averaging.speed import class_speed
from dugnad.averaging.trial import (
    STEPS,
    Answer,
    Challenge,
    Mark,
    TrialRules,
    Values,
    mark_in,
    slot_of,
    work_of,
)
from dugnad.averaging.verdicts import Verdict, sign_verdict
from dugnad.dht.advert import clean_text
from dugnad.dht.ids import PeerId
from dugnad.dht.records import encode
from dugnad.peer import clock
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.training import flat

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

TRIAL_BYTES: Final = 32
"""Of free memory for each parameter: a trial holds parameters, gradient and two moments in float32,
16 bytes; the other half stays for everybody else."""
REASON_CHARS_MAX: Final = 100
"""Of a stranger's excuse, in the journal."""
LOOK_S: Final = 5.0
"""Between two looks at whether somebody is to be examined."""


class Examination:
    """The trials of one daemon, given and taken. All methods belong to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        manifest, me = daemon.manifest, daemon.identity.peer
        rules = TrialRules(
            daemon.run_id,
            manifest.batch_sequences,
            manifest.data.context,
            manifest.data.held_out_start,
        )
        self.rules = rules
        self.examiner = Examiner(me, rules, random.Random(daemon.boot))
        self.examinee = Examinee(me, rules)
        self._anchors: dict[bytes, AnchorState] = {}
        self._marked: tuple[bytes, int] | None = None

    def look(self) -> None:
        """See whether somebody is to be examined now."""
        if self._resting():
            return
        head = self._daemon.averager.fragments[0].core.head
        needed = max(1, min(VERDICTS_MIN, len(head.members) - 1))
        self._feed(Look(clock.wall_ms(), self._newest_mark(), self._subjects(), needed))

    def heard(self, sender: PeerId, message: Challenge | Answer) -> None:
        """A challenge, or the answer to one, has come."""
        if isinstance(message, Answer):
            self._feed(AnswerIn(sender, message))
            return
        speed = self._daemon.training.tokens_per_s
        excuse = "it does not train now" if self._resting() else ""
        excuse = excuse or self.examinee.judge(sender, message, self._newest_mark(), speed)
        if excuse:
            self._daemon.swarm.send(sender, Answer(message.seed, excuse=excuse))
        else:
            self._daemon.own(self._answer(sender, message), "answer a challenge")

    def _resting(self) -> bool:
        training = self._daemon.training
        may = training.enabled and training.trains and not training.held
        whole = self._daemon.larder.whole.is_set()  # a trial may be of any of the text
        return training.ready is None or not may or not whole

    def _newest_mark(self) -> Mark | None:
        """The mark of the slot in which the head of fragment 0 lies; remembered, since a lineage in
        memory may be shorter than a slot.
        """
        core = self._daemon.averager.fragments[0].core
        head, lineage = core.head, core.view.lineage
        if not head.version:
            return None
        members = frozenset(PeerId(row.peer) for row in head.members)
        nodes = list(lineage.ancestors(head))
        rows = [(node.digest, node.time_ms) for node in nodes if node.version]
        found = mark_in(rows, members, complete=nodes[-1].version <= 1)
        slot = slot_of(head.time_ms)
        if found is None and self._marked is not None and self._marked[1] == slot:
            found = Mark(*self._marked, members)
        self._marked = (found.digest, slot) if found is not None else None
        return found

    def _subjects(self) -> list[Subject]:
        """Live peers with receipts that say they train."""
        daemon = self._daemon
        head, roster = daemon.averager.fragments[0].core.head, daemon.swarm.roster
        classes = {row.peer: row.speed_class for row in head.members}
        found = []
        for peer in daemon.averager.live():
            advert = roster.advert(peer) if roster is not None else None
            if peer not in classes or advert is None or "train" not in advert.roles:
                continue
            claim = max(advert.tokens_per_s, class_speed(classes[peer]))
            row = head.seqs.get(peer)
            verdicts = len(daemon.statements.held.verdicts(peer))
            found.append(Subject(peer, claim, verdicts, row.time_ms if row is not None else 0))
        return found

    def _feed(self, event: Event) -> None:
        for action in self.examiner.handle(event, clock.now()):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Ask(peer, challenge):
                self._keep_anchors()
                self._daemon.swarm.send(peer, challenge)
            case Missed(peer, reason):
                why = clean_text(reason, REASON_CHARS_MAX)
                label = self._daemon.happenings.label(peer)
                self._daemon.note("challenge", f"{label} could not be timed: {why}")
            case Recompute():
                self._daemon.own(self._recompute(action), "check a challenge")
            case Say():
                self._say(action)

    def _keep_anchors(self) -> None:
        """Hold on to the anchors of now: whoever is asked begins from them, or from newer ones that
        are still here when the answer comes.
        """
        averager = self._daemon.averager
        heads = [shell.core.head.digest for shell in averager.fragments]
        found = {digest: averager.anchor(p, digest) for p, digest in enumerate(heads)}
        self._anchors = {digest: one for digest, one in found.items() if one is not None}

    async def _answer(self, sender: PeerId, challenge: Challenge) -> None:
        fragments = self._daemon.averager.fragments
        heads = tuple(shell.core.head.digest for shell in fragments)
        try:
            values = await self._train(heads, work_of(challenge, self.rules))
        finally:
            self.examinee.done()
        if values:
            answer = Answer(challenge.seed, heads, tuple(values))
        else:
            answer = Answer(challenge.seed, excuse="the trial could not be trained here")
        self._daemon.swarm.send(sender, answer)

    async def _recompute(self, asked: Recompute) -> None:
        work = work_of(asked.challenge, self.rules)
        values = await self._train(asked.heads, [work[chain] for chain in asked.chains])
        self._anchors = {}
        self._feed(Recomputed(values or None))

    async def _train(self, heads: Sequence[bytes], chains: Sequence[Sequence[int]]) -> Values:
        """What the chains come to from the anchors after `heads`; nothing when these are not here
        any more, no learner is, or memory is short.
        """
        averager = self._daemon.averager
        if len(heads) != len(averager.fragments):
            return ()
        kept = self._anchors
        anchors = [averager.anchor(p, one) or kept.get(one) for p, one in enumerate(heads)]
        thetas = [one.theta for one in anchors if one is not None]
        if len(thetas) != len(heads):
            return ()
        need = TRIAL_BYTES * sum(theta.size for theta in thetas)
        if psutil.virtual_memory().available < need:
            return ()
        vector = await asyncio.to_thread(flat, thetas)
        try:
            return await self._daemon.training.trainer.prove(vector, chains, STEPS)
        except LearnerGone:
            return ()

    def _say(self, say: Say) -> None:
        daemon, now = self._daemon, clock.wall_ms()
        bare = Verdict(daemon.identity.peer, say.peer, now, say.outcome, say.speed)
        verdict = sign_verdict(bare, daemon.run_id, daemon.identity)
        daemon.statements.say(encode(verdict))
        daemon.note(
            "challenge", f"{daemon.happenings.label(say.peer)}: {say.outcome}, {say.reason}"
        )
