"""What a fragment has under way survives the daemon, and is in one place at a time."""

import dataclasses

import numpy as np
import pytest

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS
from dugnad.averaging.contributor import Contributor
from dugnad.averaging.events import HandIn
from dugnad.averaging.formats import UnitPiece
from dugnad.averaging.fragments import Group, build_table
from dugnad.averaging.lineage import Lineage, LineageRules
from dugnad.averaging.outer import bits_of
from dugnad.averaging.tree import Vector
from dugnad.averaging.view import ExchangeSettings, View
from dugnad.averaging.worker import FragmentRules, FragmentWorker, Progress
from dugnad.dht.ids import PeerId, RunId
from dugnad.peer.context import Owner
from dugnad.peer.fragmentsave import Saved, packed, take_up, unpacked
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.progress import ProgressLog
from dugnad.peer.savefile import SaveFault

ME = PeerId(b"p" * 32)
RUN = RunId(b"r" * 32)
TABLE = build_table(ModelConfig(dim=16, layers=1, heads=2, hidden=24, context=16).tensor_specs(), 2)
OWNER = Owner(RUN, ME, TABLE)
SIZE = 40
ANCHOR = AnchorState.fresh(np.linspace(-1.0, 1.0, SIZE, dtype=np.float32))
BITS = bits_of(1.0)


class Fragment:
    """One fragment of one daemon's life."""

    def __init__(self) -> None:
        rules = LineageRules(RUN, 0, 2, 4, 8, 50, ANCHOR.theta_root, 0, 8)
        lineage = Lineage(rules)
        settings = ExchangeSettings(ME, rules, BITS, BITS, can_home=True, boot=1)
        self.contributor = Contributor(View(settings, lineage, lineage.genesis))
        groups = (Group(0, SIZE, "matrix"),)
        how = FragmentRules(RUN, 0, groups, "mean", "int4", "int8", BITS, BITS)
        self.worker = FragmentWorker.start(how, ME, lineage.genesis.digest, ANCHOR)
        self.log = ProgressLog(2, 8)
        self.theta: Vector = ANCHOR.theta.copy()

    def train(self, step: int) -> None:
        """A step of noise over one piece of a unit."""
        noise = np.random.default_rng(step).standard_normal(SIZE).astype(np.float32)
        self.theta = self.theta - np.float32(0.01) * noise
        self.log.trained(step, [UnitPiece(0, step, 0, 4)])

    def hand_in(self, seq: int, step: int) -> None:
        """As the averager's shell does it."""
        progress = self.log.take(0, seq, step, speed_class=0, eligible=True)
        assert isinstance(progress, Progress)
        self.worker.hand_in(HandIn(seq, 0, ANCHOR.theta_root), self.theta, progress)

    def learned(self) -> Vector:
        """All progress that this peer still has to bring home (buffers.py)."""
        buffers = self.worker.buffers
        total: Vector = buffers.residual + (buffers.ref - self.theta)
        for kept in buffers.retained.values():
            sent = CODECS[kept.codec].decode(kept.payload, SIZE)
            total = total + np.float32(1.0 - kept.returned) * sent
        return total


def saved(fragment: Fragment) -> Saved:
    return unpacked(*packed(OWNER, 0, fragment.worker, fragment.log), OWNER, 0)


@pytest.fixture
def before() -> Fragment:
    """Two contributions under way, the first of them back in the residual."""
    made = Fragment()
    for step in (1, 2):
        made.train(step)
        made.hand_in(step, step)
    made.worker.settle(1, 1.0)
    made.log.settled(0, 1, 1.0)
    return made


def test_another_daemon_has_the_same_progress_to_bring_home(before: Fragment) -> None:
    after = Fragment()
    pieces, lost = take_up(saved(before), after.worker, after.contributor, after.log, 2)
    assert lost == ""
    np.testing.assert_allclose(after.learned(), before.learned(), atol=1e-6)
    assert after.worker.buffers.residual.tobytes() == before.worker.buffers.residual.tobytes()
    assert {p.index for p in pieces} == {1, 2}
    assert [(o.contribution.seq, o.share) for o in after.contributor.own.values()] == [
        (1, 1.0),
        (2, 0.0),
    ]
    assert after.worker.inbox[(ME, 2)] == before.worker.inbox[(ME, 2)]
    assert after.worker.buffers.last_seq == 2
    assert after.worker.buffers.anchor is ANCHOR, "the anchors are served without a second copy"


def test_work_that_came_back_goes_with_the_next_contribution_of_another_daemon(
    before: Fragment,
) -> None:
    after = Fragment()
    take_up(saved(before), after.worker, after.contributor, after.log, 2)
    after.train(3)
    progress = after.log.take(0, 3, 3, speed_class=0, eligible=True)
    assert progress is not None
    assert {p.index for p in progress.pieces} == {1, 3}, "2 is still under way"


def test_what_was_handed_in_and_not_written_down_is_given_up_and_said(before: Fragment) -> None:
    known = saved(before)
    after = Fragment()
    _, lost = take_up(known, after.worker, after.contributor, after.log, newest=3)
    assert "went with contribution 3" in lost
    assert not after.worker.buffers.residual.any(), "it is not counted twice"
    assert sorted(after.contributor.own) == [1, 2], "what is known to be under way is settled"


def test_a_save_of_another_peer_fragment_or_size_is_refused(before: Fragment) -> None:
    metadata, arrays = packed(OWNER, 0, before.worker, before.log)
    with pytest.raises(SaveFault, match="another identity"):
        unpacked(dict(metadata), arrays, dataclasses.replace(OWNER, peer=PeerId(b"q" * 32)), 0)
    with pytest.raises(SaveFault, match="another fragment"):
        unpacked(dict(metadata), arrays, OWNER, 1)
    with pytest.raises(SaveFault, match="not this peer's"):
        unpacked({**metadata, "seq": "1"}, arrays, OWNER, 0)
    with pytest.raises(SaveFault, match="what it holds"):
        unpacked(dict(metadata), {**arrays, "records": np.zeros(3, np.uint8)}, OWNER, 0)
    cut = {name: array[:-1] if name == "residual" else array for name, array in arrays.items()}
    after = Fragment()
    with pytest.raises(SaveFault, match="does not fit"):
        take_up(
            unpacked(dict(metadata), cut, OWNER, 0), after.worker, after.contributor, after.log, 2
        )
    assert not after.contributor.own
