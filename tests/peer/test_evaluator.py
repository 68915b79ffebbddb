"""Evaluating as a duty, around a daemon that exists in memory only."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging.formats import Scores
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import verify_ed25519
from dugnad.peer import clock
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.daemon import Daemon
from dugnad.peer.evaluator import RATE_SCORES, ROUNDS_HELD, Evaluator
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.roles import Duties
from dugnad.peer.scores import Score, read_score, signed

RUN = RunId(bytes(range(32)))
ME, OTHER = (Identity.ephemeral(bytes([n]) * 32) for n in (1, 2))
DIGESTS = [hashlib.sha256(bytes([n])).digest() for n in range(2)]


class World:
    """A daemon with two fragments of three parameters each, and one live peer."""

    def __init__(self, *, trains: bool = False) -> None:
        self.sent: list[tuple[PeerId, Scores]] = []
        self.refused: list[str] = []
        self.asked: list[tuple[list[float], list[int]]] = []
        self.kept: dict[str, bytes] = {}
        self.loss: float | None = 2.0
        self.whole = asyncio.Event()
        self.whole.set()
        states = [{DIGESTS[p]: SimpleNamespace(theta=np.full(3, p, np.float32))} for p in range(2)]
        shells = [SimpleNamespace(worker=SimpleNamespace(states=one)) for one in states]
        self.daemon = SimpleNamespace(
            identity=ME,
            run_id=RUN,
            manifest=SimpleNamespace(
                data=SimpleNamespace(held_out_start=100, sequences=164, context=8),
                table=SimpleNamespace(fragments=[0, 1]),
            ),
            averager=SimpleNamespace(fragments=shells, live=lambda: (OTHER.peer,)),
            swarm=SimpleNamespace(roster=None, send=lambda p, m: self.sent.append((p, m))),
            duty=SimpleNamespace(
                advertised=lambda: ("evaluate",), duties=Duties(("evaluate",), "")
            ),
            training=SimpleNamespace(
                ready=object(), trains=trains, trainer=SimpleNamespace(evaluate=self.evaluate)
            ),
            larder=SimpleNamespace(whole=self.whole),
            happenings=SimpleNamespace(refused=lambda p, why: self.refused.append(why)),
            store=SimpleNamespace(call=self.call),
            note=lambda kind, text: self.refused.append(text),
        )
        self.daemon.relay = CrowdRelay(cast(Daemon, self.daemon))
        self.evaluator = Evaluator(cast(Daemon, self.daemon))
        self.evaluator.peers_changed()

    async def evaluate(self, anchors: Any, sequences: list[int]) -> float:  # Any: an array
        if self.loss is None:
            raise LearnerGone("it died")
        self.asked.append((anchors.tolist(), sequences))
        return self.loss

    async def call(self, work: Any) -> Any:  # Any: what the store is asked
        store = SimpleNamespace(kept=self.kept.get, keep=self.kept.__setitem__)
        return work(store)

    def reach(self, version: int) -> None:
        for p in range(2):
            adopt = SimpleNamespace(version=version, digest=DIGESTS[p])
            self.evaluator.adopted(p, cast(ev.Adopt, adopt), 4096)


async def test_a_round_is_scored_with_all_fragments_and_told_to_everybody_live() -> None:
    world = World()
    world.reach(8)
    while await world.evaluator._score_one():
        pass
    assert world.asked[0][0] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    units = sorted(sequences[0] for _, sequences in world.asked)
    assert units == [100, 132]
    assert [peer for peer, _ in world.sent] == [OTHER.peer, OTHER.peer]
    score = read_score(world.sent[0][1].rows[0], RUN, verify_ed25519)
    assert (PeerId(score.peer), score.version, score.per_token) == (ME.peer, 8, 2.0)
    assert world.evaluator.tokens == 2 * 32 * 8
    world.evaluator.met(OTHER.peer)
    assert len(world.sent[-1][1].rows) == 2, "a newcomer is told what was scored"


async def test_a_learner_that_dies_scores_nothing_and_the_round_goes_on_without_it() -> None:
    world = World()
    world.reach(8)
    world.loss = None
    assert await world.evaluator._score_one() == 0.0
    assert (world.sent, world.evaluator.core.curve()) == ([], ())


async def test_who_has_not_the_whole_text_scores_nothing() -> None:
    world = World()
    world.reach(8)
    world.whole.clear()
    assert await world.evaluator._score_one() == 0.0
    assert world.asked == []


async def test_rounds_that_never_come_together_do_not_pile_up() -> None:
    world = World()
    for version in range(8, 80, 8):
        adopt = SimpleNamespace(version=version, digest=DIGESTS[0])
        world.evaluator.adopted(0, cast(ev.Adopt, adopt), 1)
    assert len(world.evaluator._kept) == ROUNDS_HELD
    assert await world.evaluator._score_one() == 0.0


def test_scores_of_others_count_and_forged_ones_are_refused() -> None:
    world = World()
    world.reach(8)
    score = Score(OTHER.peer, 8, bytes(32), 0, 512.0, 256, 4096)
    world.evaluator.heard(OTHER.peer, Scores((signed(score, RUN, OTHER),)))
    world.evaluator.heard(OTHER.peer, Scores((signed(score, RUN, ME), b"nonsense")))
    assert [point.loss for point in world.evaluator.core.curve()] == [2.0]
    assert world.refused == ["a score that its maker did not sign"]
    view = world.evaluator.view()
    assert cast(list[Any], view["earned"])[0]["pending"] == 256


def test_a_peer_that_floods_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(clock, "now", lambda: 5.0)
    row = signed(Score(OTHER.peer, 8, bytes(32), 0, 1.0, 256, 1), RUN, OTHER)
    for _ in range(RATE_SCORES):
        world.evaluator.heard(OTHER.peer, Scores((row,)))
    world.evaluator.heard(OTHER.peer, Scores((b"nonsense",)))
    assert world.refused == []
    monkeypatch.setattr(clock, "now", lambda: 50.0)
    world.evaluator.heard(OTHER.peer, Scores((b"nonsense",)))
    assert len(world.refused) == 1


async def test_what_was_earned_survives_a_restart_and_a_damaged_memory_is_said() -> None:
    world = World()
    world.reach(8)
    assert await world.evaluator._score_one()
    await world.evaluator.save()
    again = World()
    again.kept = world.kept
    await again.evaluator._restore()
    assert again.evaluator.core.earned() == world.evaluator.core.earned()
    again.kept = {"evaluation": b"\xc1"}
    await again.evaluator._restore()
    assert "is forgotten" in again.refused[0]
