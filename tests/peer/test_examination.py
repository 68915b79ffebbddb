"""Trials between two daemons' shells: asked, trained, checked, signed and told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dugnad.averaging.formats import Member, Message, decode_message
from dugnad.averaging.node import Node
from dugnad.averaging.statements import StatementSet
from dugnad.averaging.trial import SLOT_MS, Answer, Challenge
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import encode
from dugnad.peer import clock
from dugnad.peer.examination import Examination
from dugnad.peer.learner.process import LearnerGone

RUN = RunId(b"r" * 32)
ME, OTHER = Identity.ephemeral(b"1" * 32), Identity.ephemeral(b"2" * 32)
HEAD = b"h" * 32


class FakeTrainer:
    """Says for each chain the sum of its sequences, scaled by the anchors."""

    def __init__(self) -> None:
        self.gone = False
        self.lies = False
        self.chains = 0

    async def prove(self, anchor: Any, chains: Any, steps: int) -> Any:  # Any: as Trainer.prove
        if self.gone:
            raise LearnerGone("it died")
        self.chains += len(chains)
        add = 1e6 if self.lies else 1.0
        return tuple((float(anchor[0] * sum(chain)) + add, 1.0) for chain in chains)


class Net:
    """Two daemons that hear each other at once."""

    def __init__(self) -> None:
        self.daemons = {one.peer: self._daemon(one) for one in (ME, OTHER)}

    def _daemon(self, who: Identity) -> Any:  # Any: stands in for a daemon
        now_ms = clock.wall_ms()
        genesis = Node(b"g" * 32, 0, b"", now_ms - SLOT_MS, 0, (), {})
        members = tuple(Member(p, 20, True, 1) for p in sorted((ME.peer, OTHER.peer)))
        rows = {p: SimpleNamespace(time_ms=now_ms + 1000) for p in (ME.peer, OTHER.peer)}
        head = Node(HEAD, 1, genesis.digest, now_ms, 1, members, rows)  # type: ignore[arg-type]
        lineage = SimpleNamespace(ancestors=lambda node: [node, genesis])
        shell = SimpleNamespace(
            core=SimpleNamespace(head=head, view=SimpleNamespace(lineage=lineage))
        )
        state = SimpleNamespace(theta=np.full(4, 2.0, np.float32))
        notes: list[str] = []
        held = StatementSet(RUN, lambda peer: True)
        advert = SimpleNamespace(tokens_per_s=1e5, roles=("train",))
        daemon: Any = SimpleNamespace(  # Any: as above
            identity=who,
            run_id=RUN,
            boot=7,
            manifest=SimpleNamespace(
                batch_sequences=8, data=SimpleNamespace(context=128, held_out_start=1000)
            ),
            larder=SimpleNamespace(whole=SimpleNamespace(is_set=lambda: True)),
            training=SimpleNamespace(
                ready=True,
                held=False,
                enabled=True,
                trains=True,
                tokens_per_s=1e5,
                trainer=FakeTrainer(),
            ),
            averager=SimpleNamespace(
                fragments=[shell],
                anchor=lambda p, digest: state if digest == HEAD else None,
                live=lambda: tuple(p for p in self.daemons if p != who.peer),
            ),
            swarm=SimpleNamespace(
                roster=SimpleNamespace(advert=lambda peer: advert),
                send=lambda to, message: self._send(who.peer, to, message),
            ),
            statements=SimpleNamespace(
                held=held, say=lambda record: self._say(record, clock.wall_ms())
            ),
            happenings=SimpleNamespace(label=lambda peer: "somebody"),
            notes=notes,
            note=lambda kind, text: notes.append(text),
            tasks=[],
        )
        daemon.own = lambda work, name: daemon.tasks.append(asyncio.ensure_future(work))
        daemon.examination = Examination(daemon)
        return daemon

    def _send(self, sender: PeerId, to: PeerId, message: Message) -> None:
        read = decode_message(encode(message))
        assert isinstance(read, Challenge | Answer)
        self.daemons[to].examination.heard(sender, read)

    def _say(self, record: bytes, now_ms: int) -> None:
        for daemon in self.daemons.values():
            assert daemon.statements.held.take(record, now_ms) == ""

    async def rest(self) -> None:
        while any(daemon.tasks for daemon in self.daemons.values()):
            for daemon in self.daemons.values():
                tasks, daemon.tasks[:] = list(daemon.tasks), []
                await asyncio.gather(*tasks)


@pytest.fixture
async def net() -> Net:
    """Two daemons in memory."""
    return Net()


async def test_a_trial_ends_in_a_signed_verdict_that_both_hold(net: Net) -> None:
    me, other = net.daemons[ME.peer], net.daemons[OTHER.peer]
    me.examination.look()
    await net.rest()
    (verdict,) = other.statements.held.verdicts(OTHER.peer)
    assert (verdict.examiner, verdict.outcome) == (ME.peer, "proven")
    assert verdict.speed > 0
    assert other.training.trainer.chains > 2 >= me.training.trainer.chains
    assert "proven" in me.notes[0]
    me.examination.look()
    await net.rest()
    assert len(me.notes) == 1, "once in a slot"


async def test_a_lie_is_found_out(net: Net) -> None:
    net.daemons[OTHER.peer].training.trainer.lies = True
    net.daemons[ME.peer].examination.look()
    await net.rest()
    (verdict,) = net.daemons[ME.peer].statements.held.verdicts(OTHER.peer)
    assert (verdict.outcome, verdict.speed) == ("wrong", 0)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("held", "does not train now"), ("gone", "could not be trained"), ("anchors", "again here")],
)
async def test_what_cannot_be_done_is_told_and_no_verdict(
    net: Net, trouble: str, said: str
) -> None:
    me, other = net.daemons[ME.peer], net.daemons[OTHER.peer]
    if trouble == "held":
        other.training.held = True
    elif trouble == "gone":
        other.training.trainer.gone = True
    else:
        me.averager.anchor = lambda p, digest: None
    me.examination.look()
    await net.rest()
    assert said in me.notes[0]
    assert me.statements.held.everything() == ()
    assert not other.examination.examinee.busy


async def test_who_rests_examines_nobody(net: Net) -> None:
    me = net.daemons[ME.peer]
    me.training.enabled = False
    me.examination.look()
    await net.rest()
    assert me.notes == []
    assert net.daemons[OTHER.peer].training.trainer.chains == 0


async def test_a_lineage_shorter_than_its_slot_keeps_the_mark_that_was_seen(net: Net) -> None:
    me = net.daemons[ME.peer]
    core = me.averager.fragments[0].core
    first = me.examination._newest_mark()
    now = Node(b"n" * 32, 900, b"p" * 32, core.head.time_ms, 9, core.head.members, {})
    core.head = now
    core.view.lineage.ancestors = lambda node: [now]
    kept = me.examination._newest_mark()
    assert first is not None
    assert kept is not None
    assert kept.digest == first.digest == HEAD
    now.time_ms += 2 * SLOT_MS
    assert me.examination._newest_mark() is None
