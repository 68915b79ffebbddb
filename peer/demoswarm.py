"""The demo's peers: real `dugnad` processes, each with a data folder of its own, and how they are
watched, killed and cleaned up.

A peer is a daemon, its p2pd and its learner. The demo ends with none of them left, whatever
happens: it remembers every child it has seen of every daemon.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import psutil

from dugnad.dht.ids import name_of, parse_peer
from dugnad.peer.client import Client
from dugnad.peer.config import ENVIRONMENT_PREFIX
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home
from dugnad.peer.views import EventRow, PeerRow, Status

ASK_S: Final = 2.0
"""A daemon answers from memory; a later answer is a missed look, and the next look comes soon."""
KILLED_S: Final = 3.0
"""Children of a killed daemon must be gone after this."""
TERM_S: Final = 3.0
"""How long a daemon may take to end on SIGTERM when the demo is broken off."""
LOG_READ_MAX: Final = 1 << 16
"""Of a peer's log, from its start for the link, from its end for its last words."""
WORDS_LINES: Final = 4
LINK_PREFIX: Final = "dugnad:"
_PAUSE_S: Final = 0.1

# The daemon ends gracefully when the demo itself is killed (Linux); `exec` keeps the request.
_LEASHED: Final = (
    "import ctypes, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "from dugnad.peer.cli import main; main()"
)

PROGRAM: Final = (sys.executable, "-P", "-c", _LEASHED)
"""`dugnad`, of the same installation as the demo."""


def peer_environment(runtime: Path) -> dict[str, str]:
    """The environment of a peer: no setting of the user's own, sockets in `runtime`, one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    return kept | {
        "XDG_RUNTIME_DIR": str(runtime),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


@dataclass(frozen=True, slots=True)
class Look:
    """What a peer said at one moment."""

    status: Status
    peers: tuple[PeerRow, ...]
    events: tuple[EventRow, ...]
    board: Mapping[str, Any] | None
    """JSON of the leaderboard, where it was asked for."""


class DemoPeer:
    """One daemon. `number` counts from 1; `launch` starts `program` once."""

    def __init__(
        self,
        number: int,
        folder: Path,
        environment: Mapping[str, str],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.number = number
        self.home = Home(folder / f"peer-{number}")
        self.log = folder / f"peer-{number}.log"
        self.launched_at = 0.0
        self.killed = False
        self.leaving = False
        self.last: Look | None = None
        self.listed_after_s: float | None = None
        self._environment = dict(environment)
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._family: set[psutil.Process] = set()
        self._heard = 0

    @property
    def name(self) -> str:
        """The three words of its key, once it has told them."""
        if self.last is None:
            return f"peer {self.number}"
        return name_of(parse_peer(self.last.status.peer))

    @property
    def exit_code(self) -> int | None:
        """As of subprocess; None while it runs, or before it is launched."""
        return self._process.returncode if self._process is not None else None

    @property
    def lives(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def launch(self, command: str, argument: str, *, cpu_share: float) -> None:
        """`dugnad start RUN.toml` or `dugnad join LINK`, with everything else given."""
        assert self._process is None, "a demo peer starts once"
        self.launched_at = time.monotonic()
        arguments = [command, argument, "--yes", "--home", str(self.home.root)]
        arguments += ["--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", f"{cpu_share}"]
        arguments += ["--set", "upload_mbit=0", "--set", "download_mbit=0"]  # loopback is no line
        with self.log.open("wb") as log:
            starting = asyncio.create_task(self._exec(arguments, log))
            try:
                self._process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._process = await starting  # a process that nobody knew could not be stopped
                raise

    async def _exec(self, arguments: list[str], log: BinaryIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._program,
            *arguments,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to the demo, which ends its peers in order
        )

    def link(self) -> str | None:
        """The line to share, once the daemon has printed it."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            for line in file.read(LOG_READ_MAX).decode(errors="replace").splitlines(True):
                if line.startswith(LINK_PREFIX) and line.endswith("\n"):
                    return line.strip()
        return None

    def last_words(self) -> str:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_READ_MAX))
                lines = file.read(LOG_READ_MAX).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-WORDS_LINES:])

    async def look(self, *, board: bool = False) -> Look | None:
        """Ask it how it is; None when it does not answer (yet). Events come once each."""
        if not self.lives:
            return None
        look = await asyncio.to_thread(self._ask, board)
        if look is not None:
            self.last = look
            self._heard = max([self._heard, *(event.n for event in look.events)])
            if self.listed_after_s is None and look.status.join_to_listed_s is not None:
                self.listed_after_s = time.monotonic() - self.launched_at
        return look

    async def leave(self, timeout_s: float) -> int | None:
        """Ask it to hand in and leave; its exit code, None when it has not left in time."""
        assert self._process is not None
        self.leaving = True
        with contextlib.suppress(UserError):  # it may have ended meanwhile: its code tells
            client = Client(self.home, ASK_S)
            await asyncio.to_thread(client.post, "/v1/leave", {"drain": False})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)
        return self.exit_code

    async def kill(self) -> int:
        """SIGKILL to the daemon alone; how many of its children lived KILLED_S later."""
        assert self._process is not None
        await asyncio.to_thread(self._see_family)
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        return len(await self.wait_for_family(KILLED_S))

    async def wait_for_family(self, timeout_s: float) -> list[psutil.Process]:
        """Children that still live after at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        # The end of somebody else's children is no event: they are looked at again and again.
        while (left := living(self._family)) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        return left

    async def stop(self) -> None:
        """End it at any cost: SIGTERM twice (the second means at once), SIGKILL, the children."""
        if self._process is not None and self._process.returncode is None:
            self._see_family()
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), TERM_S / 2)
                    break
        for child in living(self._family):
            with contextlib.suppress(psutil.Error):
                child.kill()
        await self.wait_for_family(KILLED_S)

    def sockets_left(self) -> int:
        """Files in its folder for sockets; a daemon that left in order leaves none."""
        runtime = self.home.runtime(self._environment)
        return sum(1 for path in runtime.rglob("*") if not path.is_dir())

    def sweep(self) -> None:
        """Remove its folder for sockets: after SIGKILL only its next start would."""
        shutil.rmtree(self.home.runtime(self._environment), ignore_errors=True)

    def _see_family(self) -> None:
        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            self._family.update(psutil.Process(self._process.pid).children(recursive=True))

    def _ask(self, board: bool) -> Look | None:
        self._see_family()
        client = Client(self.home, ASK_S)
        try:
            return Look(
                msgspec.convert(client.get("/v1/status"), Status),
                tuple(msgspec.convert(client.get("/v1/peers"), list[PeerRow])),
                tuple(
                    msgspec.convert(client.get(f"/v1/events?since={self._heard}"), list[EventRow])
                ),
                client.get("/v1/leaderboard") if board else None,
            )
        except UserError:  # not up yet, or slow: the next look tells
            return None


class DemoSwarm:
    """All peers of the demo, the late one included, in the order in which they were launched."""

    def __init__(self, folder: Path, program: Sequence[str] = PROGRAM) -> None:
        self.folder = folder
        self._program = program
        self.peers: list[DemoPeer] = []
        self._environment = peer_environment(folder / "s")

    def add(self) -> DemoPeer:
        """A new peer, not launched yet."""
        (self.folder / "s").mkdir(mode=0o700, exist_ok=True)
        number = len(self.peers) + 1
        peer = DemoPeer(number, self.folder, self._environment, self._program)
        self.peers.append(peer)
        return peer

    @property
    def survivors(self) -> list[DemoPeer]:
        """Those that were not killed."""
        return [peer for peer in self.peers if not peer.killed]

    async def look(self, *, board: bool = False) -> Sequence[tuple[DemoPeer, Look]]:
        """How everybody who answers is, asked at the same moment.

        UserError when one has died that should not have.
        """
        self.check()
        asked = self.survivors
        looks = await asyncio.gather(*(peer.look(board=board) for peer in asked))
        found = zip(asked, looks, strict=True)
        return [(peer, look) for peer, look in found if look is not None]

    def check(self) -> None:
        """UserError, with its last words, when a peer has ended that should not have."""
        for peer in self.survivors:
            if peer.exit_code is not None and not peer.leaving:
                raise UserError(
                    "E005",
                    f"{peer.name} ended unexpectedly ({exit_text(peer.exit_code)})"
                    + (f":\n{words}" if (words := peer.last_words()) else ""),
                    f"its whole log is {peer.log}",
                )

    async def stop(self) -> None:
        """End everything that still runs, and remove what it left outside the demo's folder."""
        await asyncio.gather(*(peer.stop() for peer in self.peers))
        for peer in self.peers:
            peer.sweep()


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie that nobody has waited for yet has ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def exit_text(code: int) -> str:
    """An exit code as words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
