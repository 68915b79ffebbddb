"""The learner's loop: between two steps it does what the daemon asked, and then it trains on.

It never waits for the daemon while it has work, and it never sits on work: fewer sequences than a
batch are trained on after IDLE_WAIT_S. One thread, straight line.
"""

import math
import select
import socket
import time
from functools import partial
from typing import Final, assert_never

import numpy as np
import numpy.typing as npt
import torch

from dugnad.peer.corpus import TokenFile, sequence_count
from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.device import Wishes, choose
from dugnad.peer.learner.memory import Region
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.protocol import (
    VECTORS_CAPTURED,
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
    Resume,
    Sample,
    Sampled,
    SetCpuShare,
    SetMicroBatch,
    Start,
    Step,
    Stop,
    ToLearner,
    Work,
    pack,
    unpack_to_learner,
)
from dugnad.peer.learner.proving import Proving
from dugnad.peer.learner.schedule import learning_rate
from dugnad.peer.learner.stepper import Stepper
from dugnad.peer.learner.timesheet import Timesheet
from dugnad.peer.learner.workqueue import WorkQueue

IDLE_WAIT_S: Final = 0.2
"""How long a part of a batch waits for the rest: longer than the daemon takes to answer a Step."""
SKIPPED_IN_A_ROW_MAX: Final = 5
"""Steps without a finite gradient before the learner gives up: one may be bad data, five are a bad
state."""
RECEIVE_BYTES: Final = 1 << 16
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Vector = npt.NDArray[np.float32]


class Disconnected(Exception):
    """The daemon's end of the socket is closed: nobody is left to train for."""


class Unfit(Exception):
    """The learner cannot go on from its state: the text is for the daemon's log."""


class Port:
    """Messages over the socket pair, blocking; frames that came together are handed out
    together.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self._held: list[ToLearner] = []

    def start(self) -> Start:
        """The first message, which must be Start; what came with it is kept for `receive`."""
        while not self._held:
            self._held = self.receive(None)
        first = self._held.pop(0)
        if not isinstance(first, Start):
            raise ProtocolError(f"{type(first).__name__} came before Start")
        return first

    def send(self, message: FromLearner) -> None:
        """Send one message. Disconnected when the daemon is gone."""
        try:
            self._connection.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected from error

    def receive(self, wait_s: float | None) -> list[ToLearner]:
        """Messages that are there, or come first within `wait_s` (None: as long as it takes)."""
        messages, self._held = self._held, []
        ready, _, _ = select.select([self._connection], [], [], 0.0 if messages else wait_s)
        while ready:
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except ConnectionResetError as error:
                raise Disconnected from error
            if not data:
                raise Disconnected
            messages += [unpack_to_learner(body) for body in self._frames.feed(data)]
            ready, _, _ = select.select([self._connection], [], [], 0.0)
        return messages


class Learner:
    """The state of one training process; `run` returns when the daemon says Stop."""

    def __init__(self, port: Port, start: Start) -> None:
        self._port = port
        self._start = start
        count = start.table.total
        self._out = Region.attach(start.regions.out, count)
        self._inward = Region.attach(start.regions.inward, count)
        self._anchor = Region.attach(start.regions.anchor, count)
        self._capture: Region | None = None
        if start.regions.capture >= 0:
            self._capture = Region.attach(start.regions.capture, VECTORS_CAPTURED * count)
        self._tokens = TokenFile.from_fd(start.tokens_fd)
        self._queue = WorkQueue()
        self._step = start.first_step
        self._swarm_tokens = start.resume.swarm_tokens if start.resume is not None else 0
        self._cpu_share = start.cpu_share
        self._skipped_in_a_row = 0
        self._paused = False
        self._stopping = False
        self._idle_said = False
        self._short_since = 0.0  # when the queue was first seen with less than a batch
        self._rest_until = 0.0
        self._proving: Proving | None = None
        self._times = Timesheet()

    def run(self) -> None:
        """Choose device and micro-batch, say Ready, and train until Stop.

        OutOfMemory, Unfit, ProtocolError and Disconnected end it; ValueError when Start cannot be
        met.
        """
        self._prepare()
        while not self._stopping:
            self._listen(0.0)
            wait_s = self._patience()
            if wait_s == 0.0:
                self._train() if self._proving is None else self._prove()
                continue
            if not (self._queue or self._idle_said or self._paused or self._stopping):
                self._idle_said = True
                self._port.send(Idle())
            if not self._stopping:
                self._listen(wait_s)

    def _prepare(self) -> None:
        start = self._start
        torch.set_num_threads(start.threads)
        torch.manual_seed(start.seed)
        torch.set_flush_denormal(True)  # moments of unused rows fade into slow subnormals otherwise
        wishes = Wishes(start.device, start.dtype, start.micro_batch, start.micro_batch_max)
        choice = choose(wishes, start.optimiser.batch_sequences, self._make)
        self._stepper = choice.stepper
        self._model = choice.stepper.model
        if start.resume is not None:
            self._take_up(start.resume)
        self._anchors = Anchors(start.config, start.table, self._model.device)
        self._port.send(
            Ready(
                device=str(self._model.device),
                dtype=str(self._stepper.dtype).removeprefix("torch."),
                micro_batch=self._stepper.micro_batch,
                tokens_per_s=choice.tokens_per_s,
                threads=torch.get_num_threads(),
            )
        )

    def _make(self, device: torch.device, dtype: torch.dtype) -> Stepper:
        """A model with the parameters of the anchor region, and its optimiser."""
        model = FlatModel(self._start.config, self._start.table, device)
        model.load(self._anchor.array)
        return Stepper(model, self._start.optimiser, self._tokens, dtype)

    def _take_up(self, inner: InnerState) -> None:
        """Go on from a captured state; the parameters come from the anchor region like always."""
        optimiser = self._stepper.optimiser
        _, first, second = self._captured()
        self._model.read(optimiser.first_moment, first)
        self._model.read(optimiser.second_moment, second)
        optimiser.steps = inner.optimiser_steps
        if inner.random:
            state = np.frombuffer(inner.random, np.uint8).copy()
            try:
                torch.set_rng_state(torch.from_numpy(state))
            except RuntimeError as error:
                raise ValueError(f"the state of the random generator: {error}") from error
        if torch.device(inner.device).type != self._model.device.type:
            return
        if not self._start.micro_batch:  # else this one was chosen with a reason
            self._stepper.micro_batch = inner.micro_batch
        if self._start.dtype == "auto":
            self._stepper.dtype = _DTYPES.get(inner.dtype, self._stepper.dtype)

    def _captured(self) -> tuple[Vector, Vector, Vector]:
        """The three vectors of the capture region: parameters and Adam's moments."""
        if self._capture is None:
            raise ProtocolError("there is no region to capture to")
        theta, first, second = np.split(self._capture.array, VECTORS_CAPTURED)
        return theta, first, second

    def _write_capture(self, message: Capture) -> None:
        begin = time.perf_counter()
        optimiser = self._stepper.optimiser
        theta, first, second = self._captured()
        self._model.write(self._model.flat, theta)
        self._model.write(optimiser.first_moment, first)
        self._model.write(optimiser.second_moment, second)
        inner = InnerState(
            optimiser_steps=optimiser.steps,
            swarm_tokens=self._swarm_tokens,
            random=torch.get_rng_state().numpy().tobytes(),
            device=self._model.device.type,
            dtype=str(self._stepper.dtype).removeprefix("torch."),
            micro_batch=self._stepper.micro_batch,
        )
        seconds = time.perf_counter() - begin
        self._port.send(Captured(message.ticket, self._step, inner, seconds))

    def _patience(self) -> float | None:
        """Seconds to listen before the next step; 0: train now; None: there is nothing to train
        on.
        """
        if self._stopping or (self._proving is None and (self._paused or not self._queue)):
            return None
        now = time.monotonic()
        until = self._rest_until
        if self._proving is None and len(self._queue) < self._start.optimiser.batch_sequences:
            until = max(until, self._short_since + IDLE_WAIT_S)
        return max(0.0, until - now)

    def _listen(self, wait_s: float | None) -> None:
        """Hear what the daemon wants, within `wait_s`, and do it."""
        begin = heard = time.monotonic()
        messages = self._port.receive(wait_s)
        if wait_s != 0.0:
            heard = time.monotonic()
            if not self._paused:
                self._times.waited(begin, heard, self._rest_until)
        self._handle_all(messages)
        self._times.served(time.monotonic() - heard)

    def _handle_all(self, messages: list[ToLearner]) -> None:
        for message in messages:
            if not self._stopping:
                self._handle(message)

    def _handle(self, message: ToLearner) -> None:
        match message:
            case Work():
                self._take_work(message)
            case CopyOut() | AddIn():
                self._move(message)
            case Capture():
                self._write_capture(message)
            case Evaluate():
                self._evaluate(message)
            case Sample():
                self._sample(message)
            case Prove():
                self._begin_proving(message)
            case Pause():
                self._paused = True
                self._end_proving(())  # its owner comes first
            case Resume():
                self._paused = False
            case SetMicroBatch():
                self._stepper.micro_batch = message.sequences
            case SetCpuShare():
                self._cpu_share = message.share
            case Stop():
                self._stopping = True
            case Start():
                raise ProtocolError("Start came twice")
            case _:
                assert_never(message)

    def _take_work(self, work: Work) -> None:
        self._check_sequences(work.sequences)
        try:
            self._queue.add(work)
        except OverflowError as error:
            raise ProtocolError(str(error)) from error
        # Never back: what was trained since the last merge counts, and the rate of a step does not
        # depend on when a message happened to arrive.
        self._swarm_tokens = max(self._swarm_tokens, work.swarm_tokens)
        self._idle_said = False
        self._short_since = time.monotonic()

    def _check_sequences(self, sequences: list[int]) -> None:
        count = sequence_count(self._tokens.data.size, self._start.config.context)
        if sequences and not (min(sequences) >= 0 and max(sequences) < count):
            raise ProtocolError(f"a sequence beyond the {count} of the token file")

    def _move(self, verb: CopyOut | AddIn) -> None:
        if not 0 <= verb.fragment < len(self._start.table.fragments):
            raise ProtocolError(f"there is no fragment {verb.fragment}")
        begin = time.perf_counter()
        if isinstance(verb, CopyOut):
            self._model.copy_out(verb.fragment, self._out.array)
            answer: type[Copied | Added] = Copied
        else:
            self._model.add_in(verb.fragment, self._inward.array)
            answer = Added
        seconds = time.perf_counter() - begin
        self._port.send(answer(verb.ticket, verb.fragment, self._step, seconds))

    def _evaluate(self, message: Evaluate) -> None:
        self._check_sequences(message.sequences)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = self._anchors.evaluate(
            self._anchor.array, self._tokens, message.sequences, self._stepper.micro_batch
        )
        tokens = len(message.sequences) * self._start.config.context
        seconds = time.perf_counter() - begin
        self._times.asked(seconds, served=True)
        rest = self._rest(seconds, time.process_time() - begin_cpu)  # its owner's share holds here
        self._rest_until = max(self._rest_until, time.monotonic()) + rest
        self._port.send(Evaluated(message.ticket, loss, tokens, seconds))

    def _sample(self, message: Sample) -> None:
        begin = time.perf_counter()
        text = self._anchors.sample(
            self._anchor.array, message.prompt, message.length, message.seed
        )
        self._times.asked(time.perf_counter() - begin, served=True)
        self._port.send(Sampled(message.ticket, text))

    def _begin_proving(self, message: Prove) -> None:
        for chain in message.chains:
            self._check_sequences(chain)
        if self._proving is not None:
            raise ProtocolError("Prove came before the last one was answered")
        own = self._stepper
        made = partial(self._make, self._model.device, own.dtype)
        self._proving = Proving(message, made, own.micro_batch)
        if self._paused:
            self._end_proving(())

    def _prove(self) -> None:
        """One chain of a trial; between two, messages are answered and the shares kept."""
        proving = self._proving
        assert proving is not None, "there is something to prove"
        begin, begin_cpu = time.perf_counter(), time.process_time()
        over = proving.advance(self._anchor.array, self._start.optimiser.learning_rate)
        seconds = time.perf_counter() - begin
        self._times.asked(seconds)
        self._rest_until = time.monotonic() + self._rest(seconds, time.process_time() - begin_cpu)
        if over:
            self._end_proving(tuple(proving.values))

    def _end_proving(self, values: tuple[tuple[float, float], ...]) -> None:
        proving, self._proving = self._proving, None
        if proving is not None:
            self._port.send(Proved(proving.ticket, values))

    def _train(self) -> None:
        settings = self._start.optimiser
        batch = self._queue.take(settings.batch_sequences)
        self._swarm_tokens += len(batch.sequences) * self._start.config.context
        rate = learning_rate(settings, self._swarm_tokens)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        result = self._stepper.step(batch.sequences, rate)
        seconds = time.perf_counter() - begin
        self._step += 1
        self._short_since = time.monotonic()
        self._rest_until = self._short_since + self._rest(seconds, time.process_time() - begin_cpu)
        self._port.send(
            Step(
                step=self._step,
                tokens=result.tokens,
                loss=result.loss if math.isfinite(result.loss) else math.inf,
                seconds=seconds,
                pieces=batch.pieces,
                queued_sequences=len(self._queue),
                learning_rate=rate,
                micro_batch=self._stepper.micro_batch,
                skipped=result.skipped,
                spent=self._times.take(),
            )
        )
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if self._skipped_in_a_row == SKIPPED_IN_A_ROW_MAX:
            raise Unfit(f"loss or gradient was not finite in {SKIPPED_IN_A_ROW_MAX} steps in a row")

    def _rest(self, seconds: float, cpu_seconds: float) -> float:
        """Seconds to rest so that no more than `cpu_share` of a thread, or of a device, is used."""
        if self._model.device.type == "cpu":
            return max(0.0, cpu_seconds / self._start.threads / self._cpu_share - seconds)
        return max(0.0, seconds / self._start.gpu_share - seconds)
