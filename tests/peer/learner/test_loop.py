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
import torch

from dugnad.averaging.fragments import build_table
from dugnad.averaging.trial import agree
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.loop import Disconnected, Learner, Port, Unfit
from dugnad.peer.learner.memory import Region
from dugnad.peer.learner.protocol import (
    Added,
    AddIn,
    Capture,
    Captured,
    Copied,
    CopyOut,
    Evaluate,
    Evaluated,
    FrameReader,
    FromLearner,
    Idle,
    InnerState,
    Pause,
    ProtocolError,
    Prove,
    Proved,
    Ready,
    RegionFds,
    Resume,
    Sample,
    Sampled,
    SetMicroBatch,
    Start,
    Step,
    Stop,
    ToLearner,
    Work,
    pack,
    unpack_from_learner,
)
from dugnad.peer.learner.schedule import OptimiserSettings, learning_rate
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
        self.capture = Region.create("capture", 3 * TABLE.total)
        self.fds = RegionFds(self.out.fd, self.inward.fd, self.anchor.fd, self.capture.fd)
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
        except (Disconnected, ProtocolError, Unfit, ValueError) as error:
            self.ending = error

    def start(self, *messages: ToLearner) -> None:
        self.send(self._first(), *messages)
        self.thread.start()

    def resume(self, captured: Captured, *messages: ToLearner) -> None:
        first = msgspec.structs.replace(
            self._first(), first_step=captured.step, resume=captured.inner
        )
        self.send(first, *messages)
        self.thread.start()

    def _first(self) -> Start:
        tokens_fd = self.tokens.fileno()
        return Start(CONFIG, TABLE, SETTINGS, self.fds, tokens_fd, micro_batch=4, dtype="float32")

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
        for region in (self.out, self.inward, self.anchor, self.capture):
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


def test_a_trial_is_the_same_for_everybody_and_does_not_disturb_training(
    daemon: Daemon, tmp_path: Path
) -> None:
    other = Daemon(tmp_path)
    work = Work(0, 0, 0, list(range(8)), 0)
    chains = [list(range(8)), list(range(40, 48)), list(range(8))]
    daemon.start(Prove(1, chains, 2), work)
    other.start(work)
    heard = daemon.hear_until(Idle)
    daemon.send(Prove(2, [chains[1]], 2))
    proved = {
        m.ticket: m.values for m in heard + daemon.hear_until(Proved) if isinstance(m, Proved)
    }
    assert [len(proved[1]), len(proved[2])] == [3, 1]
    assert proved[1][0] == proved[1][2], "each chain begins anew"
    assert proved[1][1] == proved[2][0]
    assert proved[1][0] != proved[1][1]
    assert 0.0 < proved[1][0][0] < math.log(256), "the second step has learned from the first"
    theirs = other.hear_until(Idle)
    losses = [m.loss for m in theirs if isinstance(m, Step)]
    assert losses == [m.loss for m in heard if isinstance(m, Step)]
    other.send(SetMicroBatch(1), Prove(3, chains[:1], 2))
    (again,) = [m.values for m in other.hear_until(Proved) if isinstance(m, Proved)]
    assert agree(proved[1][0], again[0]), "other micro-batches round otherwise"
    other.close()


def test_a_paused_learner_proves_nothing(daemon: Daemon) -> None:
    daemon.start(Pause(), Prove(1, [[1, 2]], 2), CopyOut(1, 0))
    _, proved, _ = daemon.hear_until(Copied)
    assert proved == Proved(1, ())


def test_a_paused_learner_answers_but_does_not_train(daemon: Daemon) -> None:
    daemon.start(Pause(), Work(0, 0, 0, [1, 2, 3, 4], 0), CopyOut(1, 0))
    assert [type(m) for m in daemon.hear_until(Copied)] == [Ready, Copied]
    daemon.send(Resume(), CopyOut(2, 0))
    daemon.hear_until(Step)


def test_swarm_tokens_set_the_rate_and_never_turn_it_back(daemon: Daemon) -> None:
    daemon.start(Work(0, 0, 0, [1, 2, 3, 4], 0), Work(0, 0, 4, [1, 2, 3, 4], 0))
    _, first, second, _ = daemon.hear_until(Idle)
    daemon.send(Work(0, 0, 8, [1, 2, 3, 4], 10**6))
    third, _ = daemon.hear_until(Idle)
    daemon.send(Work(0, 0, 12, [1, 2, 3, 4], 10**5))
    fourth, _ = daemon.hear_until(Idle)
    rates = [m.learning_rate for m in (first, second, third, fourth) if isinstance(m, Step)]
    assert rates == [
        learning_rate(SETTINGS, tokens) for tokens in (64, 128, 10**6 + 64, 10**6 + 128)
    ]


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


def test_a_captured_learner_goes_on_bit_for_bit_in_another_process(
    daemon: Daemon, tmp_path: Path
) -> None:
    work = [Work(0, 0, 4 * n, [n, n + 1, n + 2, n + 3], 0) for n in range(40)]
    daemon.start(*work[:10])
    heard = daemon.hear_until(Idle)
    torch.rand(7)  # the generator is not where its seed has put it
    daemon.send(Capture(1), *work[10:])
    heard += daemon.hear_until(Idle)
    captured = next(m for m in heard if isinstance(m, Captured))
    steps = [m for m in heard if isinstance(m, Step)]
    assert captured.inner.optimiser_steps == captured.step == 10
    assert len(steps) == 40
    theta, *moments = np.split(daemon.capture.array, 3)
    assert all(np.abs(moment).max() > 0.0 for moment in moments)
    (tmp_path / "other").mkdir()
    other = Daemon(tmp_path / "other")
    try:
        other.anchor.array[:] = theta
        other.capture.array[:] = daemon.capture.array
        other.capture.array[: TABLE.total] = 0.0  # the parameters come from the anchor region
        other.resume(captured, *work[captured.step :])
        again = [m for m in other.hear_until(Idle) if isinstance(m, Step)]
        assert torch.get_rng_state().numpy().tobytes() == captured.inner.random
    finally:
        other.close()
    assert [(m.step, m.loss, m.learning_rate) for m in again] == [
        (m.step, m.loss, m.learning_rate) for m in steps[captured.step :]
    ]
    assert len(again) == 30


def test_what_a_captured_state_says_of_another_kind_of_device_is_not_used(daemon: Daemon) -> None:
    inner = InnerState(3, 100, b"", device="cuda", dtype="bfloat16", micro_batch=64)
    daemon.resume(Captured(0, 7, inner, 0.0), Work(0, 0, 0, [1, 2, 3, 4], 0))
    ready, step, _ = daemon.hear_until(Idle)
    assert isinstance(ready, Ready)
    assert isinstance(step, Step)
    assert (ready.dtype, ready.micro_batch, step.step) == ("float32", 4, 8)
    assert step.learning_rate == learning_rate(SETTINGS, 164)


def test_a_state_with_a_bad_random_generator_is_refused(daemon: Daemon) -> None:
    inner = InnerState(3, 100, b"x", device="cpu", dtype="float32", micro_batch=4)
    daemon.resume(Captured(0, 7, inner, 0.0))
    daemon.thread.join(30)
    assert isinstance(daemon.ending, ValueError)
    assert "random generator" in str(daemon.ending)


def test_without_a_region_nothing_can_be_captured(daemon: Daemon) -> None:
    daemon.fds = RegionFds(daemon.out.fd, daemon.inward.fd, daemon.anchor.fd)
    daemon.start(Capture(1))
    daemon.thread.join(30)
    assert isinstance(daemon.ending, ProtocolError)
