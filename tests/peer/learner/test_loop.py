"""The learner's loop over a real socket pair, in a thread of the test: order, partial batches,
refusals.
"""

import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dugnad.averaging.fragments import build_table
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.loop import Disconnected, Learner, Port, Unfit
from dugnad.peer.learner.memory import Region
from dugnad.peer.learner.protocol import (
    Added,
    AddIn,
    Copied,
    CopyOut,
    Evaluate,
    Evaluated,
    FrameReader,
    FromLearner,
    Idle,
    Pause,
    ProtocolError,
    Ready,
    RegionFds,
    Resume,
    Sample,
    Sampled,
    Start,
    Step,
    Stop,
    ToLearner,
    Work,
    pack,
    unpack_from_learner,
)
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig

pytestmark = pytest.mark.slow  # sockets

CONFIG = ModelConfig(dim=16, layers=1, heads=2, hidden=24, context=16)
TABLE = build_table(CONFIG.tensor_specs(), 2)
THETA = initial_parameters(TABLE, CONFIG, 1)
SETTINGS = OptimiserSettings(total_tokens=10**6, batch_sequences=4)
SEQUENCES = 124  # in 2000 bytes


class Daemon:
    """The other end: three regions, a token file, and a learner in a thread."""

    def __init__(self, folder: Path) -> None:
        self.out, self.inward, self.anchor = (
            Region.create(name, TABLE.total) for name in ("out", "in", "anchor")
        )
        self.anchor.array[:] = THETA
        path = folder / "tokens"
        path.write_bytes(
            np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8).tobytes()
        )
        self.tokens = path.open("rb")
        self.ours, self.theirs = socket.socketpair()
        self.frames = FrameReader()
        self.held: list[FromLearner] = []
        self.ending: BaseException | None = None
        self.thread = threading.Thread(target=self._learn)

    def _learn(self) -> None:
        port = Port(self.theirs)
        try:
            Learner(port, port.start()).run()
        except (Disconnected, ProtocolError, Unfit) as error:
            self.ending = error

    def start(self, *messages: ToLearner) -> None:
        fds = RegionFds(self.out.fd, self.inward.fd, self.anchor.fd)
        tokens_fd = self.tokens.fileno()
        start = Start(CONFIG, TABLE, SETTINGS, fds, tokens_fd, micro_batch=4, dtype="float32")
        self.send(start, *messages)
        self.thread.start()

    def send(self, *messages: ToLearner) -> None:
        self.ours.sendall(b"".join(pack(message) for message in messages))

    def hear(self) -> FromLearner:
        while not self.held:
            data = self.ours.recv(1 << 16)
            assert data, "the learner closed"
            self.held = [unpack_from_learner(body) for body in self.frames.feed(data)]
        return self.held.pop(0)

    def hear_until(self, last: type[FromLearner]) -> list[FromLearner]:
        heard = [self.hear()]
        while not isinstance(heard[-1], last):
            heard.append(self.hear())
        return heard

    def close(self) -> None:
        self.ours.close()
        if self.thread.is_alive():
            self.thread.join(30)
        self.theirs.close()
        self.tokens.close()
        for region in (self.out, self.inward, self.anchor):
            region.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.close()


def test_every_sequence_is_trained_on_once_and_the_last_ones_need_no_full_batch(
    daemon: Daemon,
) -> None:
    daemon.start(Work(0, 3, 5, [9, 8, 7, 6, 5, 4], 1000))
    assert isinstance(daemon.hear(), Ready)
    first, second, _ = daemon.hear_until(Idle)
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert [msgspec.structs.astuple(p) for p in first.pieces] == [(0, 3, 5, 9)]
    assert [msgspec.structs.astuple(p) for p in second.pieces] == [(0, 3, 9, 11)]
    assert (first.step, first.tokens, first.queued_sequences) == (1, 64, 2)
    assert (second.step, second.tokens, second.queued_sequences) == (2, 32, 0)


def test_idle_is_said_once_until_there_is_work_again(daemon: Daemon) -> None:
    daemon.start(CopyOut(1, 0), CopyOut(2, 0), Work(0, 0, 0, [1], 0), CopyOut(3, 0))
    heard = [type(message) for message in daemon.hear_until(Idle)]
    assert heard == [Ready, Copied, Copied, Copied, Step, Idle]
    daemon.send(CopyOut(4, 0))
    assert isinstance(daemon.hear(), Copied)
    daemon.send(Work(0, 0, 1, [1], 0))
    assert [type(message) for message in daemon.hear_until(Idle)] == [Step, Idle]


def test_verbs_take_effect_in_order_at_step_boundaries(daemon: Daemon) -> None:
    daemon.start(Work(0, 0, 0, list(range(40)), 0))
    steps = 0
    for ticket in range(1, 8):
        daemon.send(CopyOut(ticket, ticket % 2))
        for message in daemon.hear_until(Copied):
            if isinstance(message, Step):
                steps = message.step
            elif isinstance(message, Copied):
                assert (message.ticket, message.step) == (ticket, steps)


def test_what_is_added_is_in_the_parameters_and_nowhere_else(daemon: Daemon) -> None:
    daemon.inward.array[:] = np.linspace(-1, 1, TABLE.total, dtype=np.float32)
    daemon.start(AddIn(1, 1), CopyOut(2, 0), CopyOut(3, 1), Stop())
    assert [type(m) for m in daemon.hear_until(Copied)] == [Ready, Added, Copied]
    daemon.hear()
    expected = THETA.copy()
    expected[TABLE.offsets[1] :] += daemon.inward.array[TABLE.offsets[1] :]
    assert np.array_equal(daemon.out.array, expected)


def test_evaluating_and_sampling_use_the_anchors_and_do_not_disturb_training(
    daemon: Daemon, tmp_path: Path
) -> None:
    other = Daemon(tmp_path)
    work = Work(0, 0, 0, list(range(8)), 0)
    asked = (Evaluate(1, list(range(100, 124))), Sample(2, b"a", 5, 7), Sample(3, b"a", 5, 7))
    daemon.start(Pause(), work, *asked, Resume())
    other.start(work)
    _, evaluated, one, same, *heard = daemon.hear_until(Idle)
    assert isinstance(evaluated, Evaluated)
    assert evaluated.loss == pytest.approx(math.log(256), rel=0.02)  # nothing is learned yet
    assert evaluated.tokens == 24 * 16
    assert isinstance(one, Sampled)
    assert isinstance(same, Sampled)
    assert len(one.text) == 5
    assert one.text == same.text
    losses = [m.loss for m in heard if isinstance(m, Step)]
    assert losses == [m.loss for m in other.hear_until(Idle) if isinstance(m, Step)]
    assert len(losses) == 2
    other.close()


def test_a_paused_learner_answers_but_does_not_train(daemon: Daemon) -> None:
    daemon.start(Pause(), Work(0, 0, 0, [1, 2, 3, 4], 0), CopyOut(1, 0))
    assert [type(m) for m in daemon.hear_until(Copied)] == [Ready, Copied]
    daemon.send(Resume(), CopyOut(2, 0))
    daemon.hear_until(Step)


def test_swarm_tokens_set_the_rate(daemon: Daemon) -> None:
    daemon.start(Work(0, 0, 0, [1, 2, 3, 4], 10**6), Work(0, 0, 4, [1, 2, 3, 4], 0))
    _, first, second, _ = daemon.hear_until(Idle)
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert first.learning_rate == pytest.approx(1e-3, rel=1e-3)  # what was told last counts


def test_a_state_without_a_finite_loss_ends_the_learner(daemon: Daemon) -> None:
    daemon.anchor.array[:] = np.nan
    daemon.start(Work(0, 0, 0, [0] * 40, 0))
    _, *steps = [daemon.hear() for _ in range(6)]
    assert all(isinstance(step, Step) and step.skipped and step.tokens == 0 for step in steps)
    daemon.thread.join(30)
    assert isinstance(daemon.ending, Unfit)


@pytest.mark.parametrize(
    "message",
    [
        Work(0, 0, 0, [SEQUENCES], 0),
        Work(0, 0, 0, [-1], 0),
        Evaluate(1, [SEQUENCES]),
        CopyOut(1, 2),
    ],
)
def test_impossible_requests_end_the_conversation(daemon: Daemon, message: ToLearner) -> None:
    daemon.start(message)
    daemon.thread.join(30)
    assert isinstance(daemon.ending, ProtocolError)


def test_a_learner_without_a_daemon_ends(daemon: Daemon) -> None:
    daemon.start(Work(0, 0, 0, list(range(100)), 0))
    daemon.hear()
    daemon.ours.close()
    daemon.thread.join(30)
    assert isinstance(daemon.ending, Disconnected)
