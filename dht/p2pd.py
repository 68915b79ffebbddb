"""The libp2p daemon as a child process: started, watched, asked, and never left behind.

It ends with us in three ways: `close`; a persistent control connection that we hold and that the
kernel closes whatever ends us (p2pd stops when the last one closes); and on Linux a parent-death
signal, for a p2pd that hangs. Its output is kept (the last lines only) to say why it failed.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from dugnad.dht import control
from dugnad.dht.addresses import parse_address, read_varint

log = logging.getLogger(__name__)

# p2pd is up in 0.1 s on an idle machine; a starved board needs longer.
START_TIMEOUT_S = 20.0
# p2pd stops in milliseconds after SIGTERM unless it hangs.
STOP_TIMEOUT_S = 2.0
# A local request that asks nobody else (identify, list of peers, a new handler).
LOCAL_TIMEOUT_S = 5.0
# The longest answer of the address book: 256 entries of 2 KiB, doubled.
DHT_MESSAGE_BYTES_MAX = 1 << 20
OUTPUT_LINES_MAX = 30
OUTPUT_LINE_CHARS_MAX = 400
_VARINT_BYTES_MAX = 5

# Runs in a fresh interpreter that becomes p2pd: asks the kernel for a SIGKILL when the parent dies.
# Not a preexec_fn, which would run Python in a forked child of a process with threads.
_LAUNCH = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class SubstrateError(Exception):
    """The libp2p daemon cannot be started or used; the text says why, in its own last words."""


@dataclass(frozen=True, slots=True)
class P2pdSettings:
    """What p2pd is started with. Paths are absolute; without `listen` nobody can dial us."""

    binary: Path
    identity: Path
    folder: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    nat_port_map: bool = False
    relay: bool = False
    client_only: bool = False

    @property
    def socket_path(self) -> Path:
        """The control socket."""
        return self.folder / "p2pd.sock"

    def arguments(self) -> list[str]:
        """The command line of p2pd."""
        flags = [
            f"-listen=/unix{self.socket_path}",
            f"-id={self.identity}",
            "-b=0",  # never the public IPFS swarm: seeds are dialled by us, one by one
            "-connManager=1",
            "-autonat=1",  # in p2pd this flag also turns hole punching on
            f"-natPortMap={int(self.nat_port_map)}",
            # The relay *client* is always on; this makes us a relay for others, at our cost.
            f"-relay={int(self.relay)}",
            f"-relayService={int(self.relay)}",
            "-dhtClient=1" if self.client_only else "-dhtServer=1",
            f"-idleTimeout={int(START_TIMEOUT_S)}s",
            f"-persistentConnMaxMsgSize={DHT_MESSAGE_BYTES_MAX}",
        ]
        flags.append(f"-hostAddrs={','.join(self.listen)}" if self.listen else "-noListenAddrs=1")
        if self.announce:
            flags.append(f"-announceAddrs={','.join(self.announce)}")
        return flags


class P2pd:
    """One p2pd process. `start` once, then `request`; `died` resolves if it ends by itself."""

    def __init__(self, settings: P2pdSettings) -> None:
        self.settings = settings
        self.died: asyncio.Future[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Event = asyncio.Event()
        self._lifeline: socket.socket | None = None
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self._closing = False

    @property
    def pid(self) -> int:
        """The process id; 0 when it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    @property
    def output(self) -> str:
        """The last lines that p2pd printed."""
        return "\n".join(self._lines)

    async def start(self) -> None:
        """Starts p2pd and waits until it answers; SubstrateError with its own words if it fails."""
        loop = asyncio.get_running_loop()
        self.died = loop.create_future()
        program = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())]
        environment = {**os.environ, "GOLOG_LOG_FMT": "json", "GOLOG_LOG_LEVEL": "error"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *program,
                str(self.settings.binary),
                *self.settings.arguments(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach us alone: a graceful leave needs p2pd
            )
        except OSError as error:
            raise SubstrateError(f"cannot run {self.settings.binary}: {error}") from error
        self._watcher = asyncio.create_task(self._watch(self._process), name="p2pd watcher")
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.close()
            raise

    async def _wait_until_ready(self) -> None:
        assert self.died is not None
        ready = asyncio.create_task(self._ready.wait(), name="p2pd ready")
        try:
            await asyncio.wait(
                (ready, self.died),
                timeout=START_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            ready.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ready
        if self.died.done():
            raise SubstrateError(_failure(self._lines))
        if not self._ready.is_set():
            raise SubstrateError(f"p2pd did not start in {START_TIMEOUT_S:.0f} s: {self.output}")
        try:
            self._lifeline, _ = await self.request(control.persist(), LOCAL_TIMEOUT_S, keep=True)
        except (control.ControlError, OSError, TimeoutError) as error:
            raise SubstrateError(f"p2pd does not answer: {error}") from error

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Reads p2pd's output until it ends, then says so."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-OUTPUT_LINE_CHARS_MAX:]
            for line in lines:
                self._note(line.decode("utf-8", "replace")[:OUTPUT_LINE_CHARS_MAX])
        if rest:
            self._note(rest.decode("utf-8", "replace"))
        code = await process.wait()
        if self.died is not None and not self.died.done():
            self.died.set_result(f"p2pd ended with status {code}: {self.output}")
        if self._lifeline is not None and not self._closing:
            log.warning("p2pd ended by itself: status=%s", code)

    def _note(self, line: str) -> None:
        self._lines.append(_plain(line))
        if line.startswith("Peer ID:"):
            self._ready.set()

    async def request(
        self, message: bytes, timeout_s: float, *, keep: bool = False
    ) -> tuple[socket.socket, control.Response]:
        """Sends one control request; returns the connection (closed unless `keep`) and the answer.

        Raises ControlError (p2pd refused), OSError (p2pd is gone) or TimeoutError. The connection
        is closed in every case but success with `keep`.
        """
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        kept = False
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(connection, str(self.settings.socket_path))
                await loop.sock_sendall(connection, message)
                response = control.parse_response(await read_message(connection))
            kept = keep
            return connection, response
        finally:
            if not kept:
                connection.close()

    async def close(self) -> None:
        """Stops p2pd: politely, then by force. Idempotent."""
        self._closing = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._watcher is not None:
            await self._watcher
            self._watcher = None
        self.settings.socket_path.unlink(missing_ok=True)


async def read_message(connection: socket.socket) -> bytes:
    """One length-prefixed message and not a byte more (a stream's bytes follow it)."""
    loop = asyncio.get_running_loop()
    head = b""
    while not head or head[-1] & 0x80:
        byte = await loop.sock_recv(connection, 1)
        if not byte or len(head) >= _VARINT_BYTES_MAX:
            raise control.ControlError("p2pd closed the connection")
        head += byte
    size, _ = read_varint(head)
    if size > control.RESPONSE_BYTES_MAX:
        raise control.ControlError(f"p2pd announced an answer of {size} bytes")
    message = bytearray(size)
    got = 0
    while got < size:
        count = await loop.sock_recv_into(connection, memoryview(message)[got:])
        if not count:
            raise control.ControlError("p2pd closed the connection")
        got += count
    return bytes(message)


_ADDRESS_REASON = re.compile(r"\* \[(?P<address>/[^\]]+)\] (?P<reason>.+)")
_IN_USE = re.compile(r"(?P<address>[\w.:\[\]*]+:(?P<port>\d+)): bind: address already in use")


def dial_reasons(message: str) -> list[tuple[str, str]]:
    """p2pd's text for a failed dial as (address, reason in plain words), one for each address."""
    found = [(m["address"], plain_reason(m["reason"])) for m in _ADDRESS_REASON.finditer(message)]
    return found or [("", plain_reason(message))]


def plain_reason(message: str) -> str:
    """One failed dial in plain words; p2pd's own text where it is not a known case."""
    text = " ".join(message.split())
    for pattern, words in (
        ("connection refused", "connection refused (nobody listens there)"),
        ("peer id mismatch", "wrong peer id (somebody else answers there)"),
        ("no route to host", "no route to that host"),
        ("network is unreachable", "that network is unreachable from here"),
        ("no recent network activity", "no answer in time"),
        ("deadline exceeded", "no answer in time"),
        ("i/o timeout", "no answer in time"),
        ("dial backoff", "it failed a moment ago and is not tried again yet"),
        ("protocols not supported", "the peer does not speak this protocol"),
        ("protocol not supported", "the peer does not speak this protocol"),
        ("dial to self", "that is our own peer id"),
        ("no such host", "no such host name"),
        ("no addresses", "no address is known"),
        ("routing: not found", "no address is known"),
        ("failed to find any peer in table", "no address is known"),
    ):
        if pattern in text:
            return words
    return text[:OUTPUT_LINE_CHARS_MAX]


def listen_addresses(hosts: tuple[str, ...], tcp_port: int, quic_port: int) -> tuple[str, ...]:
    """The TCP and QUIC addresses to listen on for each IP address; port 0 is any free port."""
    out = []
    for host in hosts:
        family = "ip6" if ":" in host else "ip4"
        out.append(str(parse_address(f"/{family}/{host}/tcp/{tcp_port}")))
        out.append(str(parse_address(f"/{family}/{host}/udp/{quic_port}/quic-v1")))
    return tuple(out)


def _failure(lines: deque[str]) -> str:
    text = "\n".join(lines)
    if found := _IN_USE.search(text):
        return f"port {found['port']} is already in use: {text}"
    return f"p2pd failed to start: {text or 'it printed nothing'}"


def _plain(line: str) -> str:
    """The message of a JSON log line, other lines as they are."""
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict):
        return line
    error = record.get("error")
    return f"{record.get('msg', line)}: {error}" if error else str(record.get("msg", line))
