"""The evaluating learner over a real socket pair: same loss as a trainer's, and nothing else."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from dugnad.averaging.fragments import build_table
from dugnad.peer.corpus import TokenFile
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.loop import Disconnected, Port
from dugnad.peer.learner.memory import Region
from dugnad.peer.learner.protocol import (
    CopyOut,
    Evaluate,
    Evaluated,
    FrameReader,
    FromLearner,
    Pause,
    ProtocolError,
    Ready,
    RegionFds,
    Sample,
    Sampled,
    SetCpuShare,
    Start,
    Stop,
    ToLearner,
    pack,
    unpack_from_learner,
)
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.learner.scorer import Scorer
from dugnad.peer.modelconfig import ModelConfig

pytestmark = pytest.mark.slow  # sockets

CONFIG = ModelConfig(dim=16, layers=1, heads=2, hidden=24, context=16)
TABLE = build_table(CONFIG.tensor_specs(), 2)
THETA = initial_parameters(TABLE, CONFIG, 1)
TEXT = np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8)


class Daemon:
    """The other end: the anchors, a token file, and an evaluating learner in a thread."""

    def __init__(self, folder: Path) -> None:
        self.anchor = Region.create("anchor", TABLE.total)
        self.anchor.array[:] = THETA
        (folder / "tokens").write_bytes(TEXT.tobytes())
        self.tokens = (folder / "tokens").open("rb")
        fd = self.anchor.fd
        self.first = Start(
            CONFIG,
            TABLE,
            OptimiserSettings(total_tokens=10**6, batch_sequences=4),
            RegionFds(fd, fd, fd),
            self.tokens.fileno(),
            forward_only=True,
        )
        self.ours, self.theirs = socket.socketpair()
        self.frames = FrameReader()
        self.held: list[FromLearner] = []
        self.ending: BaseException | None = None
        self.thread = threading.Thread(target=self._score)

    def _score(self) -> None:
        port = Port(self.theirs)
        try:
            Scorer(port, port.start()).run()
        except (Disconnected, ProtocolError) as error:
            self.ending = error

    def start(self, **changes: object) -> None:
        self.send(msgspec.structs.replace(self.first, **changes))
        self.thread.start()

    def send(self, *messages: ToLearner) -> None:
        self.ours.sendall(b"".join(pack(message) for message in messages))

    def hear(self) -> FromLearner:
        while not self.held:
            data = self.ours.recv(1 << 16)
            assert data, "the learner closed"
            self.held = [unpack_from_learner(body) for body in self.frames.feed(data)]
        return self.held.pop(0)

    def close(self) -> None:
        self.ours.close()
        if self.thread.is_alive():
            self.thread.join(30)
        self.theirs.close()
        self.tokens.close()
        self.anchor.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.close()


def test_it_scores_as_a_trainer_does_and_writes_text(daemon: Daemon) -> None:
    daemon.start()
    ready = daemon.hear()
    assert isinstance(ready, Ready)
    assert (ready.device, ready.dtype) == ("cpu", "float32")
    assert ready.tokens_per_s > 0
    daemon.send(Evaluate(1, [3, 5, 70]), Sample(2, b"ab", 3, 0))
    scored, written = daemon.hear(), daemon.hear()
    assert isinstance(scored, Evaluated)
    assert isinstance(written, Sampled)
    anchors = Anchors(CONFIG, TABLE, torch.device("cpu"))
    expected = anchors.evaluate(THETA, TokenFile(TEXT), [3, 5, 70], 2)
    assert scored.loss == pytest.approx(expected, rel=1e-5)
    assert (scored.ticket, scored.tokens) == (1, 48)
    assert len(written.text) == 3
    daemon.send(Pause(), SetCpuShare(0.5), Stop())
    daemon.thread.join(10)
    assert (daemon.thread.is_alive(), daemon.ending) == (False, None)


@pytest.mark.parametrize("message", [CopyOut(1, 0), Evaluate(1, [124])])
def test_what_it_cannot_do_ends_the_conversation(daemon: Daemon, message: ToLearner) -> None:
    daemon.start()
    assert isinstance(daemon.hear(), Ready)
    daemon.send(message)
    daemon.thread.join(10)
    assert isinstance(daemon.ending, ProtocolError)


def test_the_owners_memory_bounds_the_micro_batch(daemon: Daemon) -> None:
    daemon.start(micro_batch_max=1)
    ready = daemon.hear()
    assert isinstance(ready, Ready)
    assert ready.micro_batch == 1
