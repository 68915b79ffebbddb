"""One learner process as the daemon sees it: started, spoken to, and seen to its end. Loads no
torch.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dugnad.peer.learner.protocol import (
    Added,
    AddIn,
    Capture,
    Captured,
    Copied,
    CopyOut,
    Evaluate,
    Evaluated,
    Failed,
    FrameReader,
    Idle,
    ProtocolError,
    Prove,
    Proved,
    Ready,
    Sample,
    Sampled,
    Start,
    Step,
    Stop,
    ToLearner,
    pack,
    unpack_from_learner,
)

READ_BYTES: Final = 1 << 16
STOP_SECONDS: Final = 10.0
"""A step that is under way may end, then the process is killed."""
LAST_WORDS_BYTES: Final = 2000
"""The end of what a learner wrote to stderr, for the log of its death."""
_READY_TICKET: Final = 0  # answers to Start; the learner's other answers carry tickets from 1

GPU_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""With these each driver hides the devices that the owner keeps."""

Answer = Ready | Copied | Added | Captured | Evaluated | Sampled | Proved
Question = Start | CopyOut | AddIn | Capture | Evaluate | Sample | Prove
AnswerType = TypeVar("AnswerType", Ready, Copied, Added, Captured, Evaluated, Sampled, Proved)


class LearnerGone(Exception):
    """The learner process has ended, so what was asked of it will not be answered; the text says
    why.
    """


@dataclass(frozen=True, slots=True)
class Exited:
    """The process has ended. `expected`: it was told to stop. `returncode` as of subprocess."""

    returncode: int
    reason: str
    expected: bool


LearnerEvent = Step | Idle | Failed | Exited


class LearnerProcess:
    """A process of `python -m dugnad.peer.learner` and the conversation with it.

    `on_event` gets Step, Idle, Failed and at last Exited, in order, from the event loop; it must
    not block.
    """

    def __init__(self, on_event: Callable[[LearnerEvent], None]) -> None:
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._stopping = False
        self._failure = ""
        self._last_words = b""
        self.exited: Exited | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self.exited is None else None

    async def launch(
        self,
        fds: Sequence[int],
        threads: int,
        cores: Sequence[int] = (),
        gpus: Sequence[int] | None = None,
    ) -> None:
        """Start the process with `fds` inherited. OSError when it cannot be started.

        It stays on `cores` (none: any) and sees the GPUs with these numbers only (None: all).
        """
        assert self._process is None, "a LearnerProcess starts once"
        ours, theirs = socket.socketpair()
        command: tuple[str, ...] = (sys.executable, "-P", "-m", "dugnad.peer.learner")
        command = (*command, "--fd", str(theirs.fileno()))
        if cores:
            command = (*command, "--cores", ",".join(map(str, cores)))
        count = str(threads)
        seen = {} if gpus is None else dict.fromkeys(GPU_VARIABLES, ",".join(map(str, gpus)))
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=(theirs.fileno(), *fds),
                env=os.environ | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count} | seen,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            undo.pop_all()
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._watching = asyncio.create_task(self._watch(self._process, reader), name="learner")

    def send(self, message: ToLearner) -> None:
        """Send without waiting: messages are small and their number is bounded by their senders."""
        if self._writer is None or self.exited is not None or self._writer.is_closing():
            raise LearnerGone(self.exited.reason if self.exited else "the learner is not running")
        self._writer.write(pack(message))

    def ask(self, question: Question) -> asyncio.Future[Answer]:
        """Send a question; its answer resolves the future, or LearnerGone does.

        Wait for it through `answer`, which leaves the future alive when the waiter is cancelled.
        """
        ticket = _READY_TICKET if isinstance(question, Start) else question.ticket
        assert ticket not in self._waiting
        self.send(question)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting[ticket] = future
        return future

    async def stop(self, timeout_s: float = STOP_SECONDS) -> Exited:
        """End the process: Stop, and SIGKILL after `timeout_s`. Returns once nothing of it is
        left.
        """
        if self._watching is None:
            return Exited(-1, "it was never launched", True)
        self._stopping = True
        if timeout_s > 0.0:
            with contextlib.suppress(LearnerGone):
                self.send(Stop())
            await asyncio.wait([self._watching], timeout=timeout_s)
        self._kill()
        await asyncio.wait([self._watching])
        assert self.exited is not None
        return self.exited

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _watch(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader
    ) -> None:
        words = asyncio.create_task(
            self._listen_to_last_words(process.stderr), name="learner-stderr"
        )
        try:
            await self._converse(reader)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except ProtocolError as error:
            self._failure = str(error)
        finally:
            self._kill()
            returncode = await process.wait()
            await words
            self._finish(returncode)

    async def _converse(self, reader: asyncio.StreamReader) -> None:
        """Until the learner closes its end. ProtocolError when it sends something malformed."""
        frames = FrameReader()
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(READ_BYTES):
                for body in frames.feed(data):
                    message = unpack_from_learner(body)
                    if isinstance(message, Step | Idle | Failed):
                        if isinstance(message, Failed):
                            self._failure = message.reason
                        self._on_event(message)
                    else:
                        self._answered(message)

    def _answered(self, message: Answer) -> None:
        ticket = _READY_TICKET if isinstance(message, Ready) else message.ticket
        future = self._waiting.pop(ticket, None)
        if future is None:
            raise ProtocolError(
                f"the learner answered {type(message).__name__}, which nobody asked"
            )
        future.set_result(message)

    async def _listen_to_last_words(self, stderr: asyncio.StreamReader | None) -> None:
        assert stderr is not None
        while data := await stderr.read(READ_BYTES):
            self._last_words = (self._last_words + data)[-LAST_WORDS_BYTES:]

    def _finish(self, returncode: int) -> None:
        reason = self._failure or self._last_words.decode(errors="replace").strip()
        if returncode < 0:
            reason = f"killed by {signal.Signals(-returncode).name} {reason}".strip()
        if self._stopping and returncode in (0, -signal.SIGKILL):
            reason = "stopped"
        self.exited = Exited(returncode, reason or f"exit code {returncode}", self._stopping)
        if self._writer is not None:
            self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(LearnerGone(f"the learner ended: {self.exited.reason}"))
        self._on_event(self.exited)


async def answer(future: asyncio.Future[Answer], kind: type[AnswerType]) -> AnswerType:
    """Wait for an answer. Cancelling the waiter does not cancel the question."""
    found = await asyncio.shield(future)
    if not isinstance(found, kind):
        raise ProtocolError(f"expected {kind.__name__}, the learner sent {type(found).__name__}")
    return found


def _retrieve(future: asyncio.Future[Answer]) -> None:
    """Look at the error of a future whose waiter may be gone, or asyncio complains that nobody
    did.
    """
    if not future.cancelled():
        future.exception()
