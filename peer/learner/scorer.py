"""The learner of a machine that only evaluates: forward passes with the agreed parameters.

It makes no gradient and no optimiser state, so it needs about half of the memory. Same process,
same messages; what only a trainer can do is refused.
"""

import time

import torch

from dugnad.peer.corpus import TokenFile, sequence_count
from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.device import Wishes, choose_forward
from dugnad.peer.learner.loop import Port
from dugnad.peer.learner.memory import Region
from dugnad.peer.learner.protocol import (
    Evaluate,
    Evaluated,
    Pause,
    ProtocolError,
    Ready,
    Resume,
    Sample,
    Sampled,
    SetCpuShare,
    SetMicroBatch,
    Start,
    Stop,
    ToLearner,
)


class Scorer:
    """The state of one evaluating process; `run` returns when the daemon says Stop."""

    def __init__(self, port: Port, start: Start) -> None:
        self._port = port
        self._start = start
        self._anchor = Region.attach(start.regions.anchor, start.table.total)
        self._tokens = TokenFile.from_fd(start.tokens_fd)
        self._waiting: list[Evaluate | Sample] = []
        self._micro_batch = 1
        self._cpu_share = start.cpu_share
        self._rest_until = 0.0
        self._stopping = False

    def run(self) -> None:
        """Choose device and micro-batch, say Ready, and answer until Stop.

        OutOfMemory, ProtocolError and Disconnected end it; ValueError when Start cannot be met.
        """
        self._prepare()
        while not self._stopping:
            wait_s = max(0.0, self._rest_until - time.monotonic()) if self._waiting else None
            for message in self._port.receive(wait_s):
                self._handle(message)
            if self._waiting and not self._stopping and time.monotonic() >= self._rest_until:
                self._answer(self._waiting.pop(0))

    def _prepare(self) -> None:
        start = self._start
        torch.set_num_threads(start.threads)
        torch.set_flush_denormal(True)

        def make(device: torch.device) -> Anchors:
            made = Anchors(start.config, start.table, device)
            made.load(self._anchor.array)
            return made

        wishes = Wishes(start.device, start.dtype, start.micro_batch, start.micro_batch_max)
        self._anchors, self._micro_batch, rate = choose_forward(
            wishes, start.optimiser.batch_sequences, make
        )
        self._device = self._anchors.device
        self._port.send(
            Ready(
                device=str(self._device),
                dtype="float32",
                micro_batch=self._micro_batch,
                tokens_per_s=rate,
                threads=torch.get_num_threads(),
            )
        )

    def _handle(self, message: ToLearner) -> None:
        match message:
            case Evaluate() | Sample():
                self._waiting.append(message)  # the daemon asks for one thing at a time
            case Pause() | Resume():
                pass  # it rests whenever nobody asks
            case SetMicroBatch(sequences):
                self._micro_batch = sequences
            case SetCpuShare(share):
                self._cpu_share = share
            case Stop():
                self._stopping = True
            case _:
                raise ProtocolError(f"an evaluating learner cannot {type(message).__name__}")

    def _answer(self, message: Evaluate | Sample) -> None:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        context = self._start.config.context
        answer: Evaluated | Sampled
        if isinstance(message, Evaluate):
            self._check(message.sequences)
            loss = self._anchors.evaluate(
                self._anchor.array, self._tokens, message.sequences, self._micro_batch
            )
            seconds = time.perf_counter() - begin
            tokens = len(message.sequences) * context
            answer = Evaluated(message.ticket, loss, tokens, seconds)
        else:
            text = self._anchors.sample(
                self._anchor.array, message.prompt, message.length, message.seed
            )
            answer = Sampled(message.ticket, text)
        self._rest(time.perf_counter() - begin, time.process_time() - begin_cpu)
        self._port.send(answer)

    def _check(self, sequences: list[int]) -> None:
        count = sequence_count(self._tokens.data.size, self._start.config.context)
        if not 0 <= min(sequences) <= max(sequences) < count:
            raise ProtocolError(f"a sequence beyond the {count} of the token file")

    def _rest(self, seconds: float, cpu_seconds: float) -> None:
        """Rest so that no more than the owner's share of a thread, or of a device, is used."""
        if self._device.type == "cpu":
            rest = cpu_seconds / self._start.threads / self._cpu_share - seconds
        else:
            rest = seconds / self._start.gpu_share - seconds
        self._rest_until = time.monotonic() + max(0.0, rest)
