"""Hosts in network namespaces of their own, joined by an emulated wide-area network. Needs root.

    with Hosts({"a": Line(10, 20, 25.0), "b": Line(), "c": Line()}, behind_nat={"c"}) as hosts:
        process = hosts["a"].popen(["dugnad", "start", ...])
        status = hosts["a"].call(lambda: ask_over_loopback())
        hosts.split(["a"], ["b", "c"])

A host is a namespace with a TUN device; one child process, the emulator, holds every namespace and
device and carries packets between them as `_wan` says (the kernel's netem is often not built). A
host behind NAT has a router with its own namespace and masquerading; nothing new comes in.

Nothing has a name in the system, so nothing is left: namespaces end with the last process in them,
devices and veth pairs with their namespace, the emulator with the pipe from its parent, and what a
host started gets SIGKILL from the kernel when the thread that started it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
from _wan import Line, Wan, numbered

T = TypeVar("T")
NETWORK: Final = "198.18.0"
"""RFC 2544 set these addresses aside for tests of networks."""
LAN: Final = "192.168.77"
HOSTS_MAX: Final = 64
_PREFIX: Final = bytes(int(part) for part in NETWORK.split("."))
MOVED: Final = 100
"""A host that moved has an address so much higher."""
_MULTICAST_DNS: Final = bytes([224, 0, 0, 251])
MTU: Final = 1500
BATCH: Final = 64
"""Packets read from one device before the others have their turn."""
EARLY_S: Final = 0.0005
"""The poll of the kernel counts in milliseconds: what is due within half of one goes now."""
START_S: Final = 20.0
END_S: Final = 5.0
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
# Becomes the program, with SIGKILL for when its parent's thread ends.
_LEASH: Final = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_NAT_RULES: Final = """
table ip nat {
  chain post {
    type nat hook postrouting priority 100;
    oifname "wan0" masquerade
  }
}
table ip walls {
  chain through {
    type filter hook forward priority 0; policy drop;
    iifname "lan0" accept
    ct state established,related accept
  }
  chain into {
    type filter hook input priority 0; policy drop;
    iifname != "wan0" accept
    ct state established,related accept
  }
}
"""


def missing(*, nat: bool = False) -> str:
    """Why hosts cannot be made here; '' when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    tools = ["ip", "nft"] if nat else ["ip"]
    lacking = [one for one in tools if shutil.which(one) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (packages iproute2, nftables)"
    try:
        subprocess.run(["unshare", "--net", "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "this machine makes no network namespaces"
    return ""


class Host:
    """One host: start programs on it, or call functions whose sockets are its own."""

    def __init__(self, name: str, address: str, namespace: str) -> None:
        self.name = name
        self.address = address
        """Where others see it; of a host behind NAT, its router's."""
        self._namespace = namespace
        self._thread: ThreadPoolExecutor | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._families: set[psutil.Process] = set()

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread that lives in this host's namespace; what it gives."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, f"host {self.name}", partial(_enter, self._namespace)
            )
        return self._thread.submit(work).result()

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program here; options as of subprocess.Popen. It ends with us at the latest."""
        leash = [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid())]
        process = self.call(lambda: subprocess.Popen([*leash, *command], **options))
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End everything that was started here, and what that started."""
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                self._families.update(psutil.Process(process.pid).children(recursive=True))
            if process.poll() is None:
                process.kill()
                process.wait()
        for one in self._families:  # psutil knows a process by its start time, too
            with contextlib.suppress(psutil.Error):
                one.kill()
        until = time.monotonic() + END_S
        while any(_runs(one) for one in self._families) and time.monotonic() < until:
            time.sleep(0.02)
        if self._thread is not None:
            self._thread.shutdown()


class Hosts:
    """The hosts of one network, from `with` to its end. RuntimeError when they cannot be made."""

    def __init__(
        self,
        lines: Mapping[str, Line],
        behind_nat: Collection[str] = (),
        seed: int = 0,
        *,
        without_tcp: bool = False,
    ) -> None:
        """``without_tcp``: a network that carries no TCP, as some guest networks do."""
        if len(lines) > HOSTS_MAX:
            raise ValueError(f"{len(lines)} hosts, at most {HOSTS_MAX}")
        self._lines = dict(lines)
        self._nat = frozenset(behind_nat)
        self._seed = seed
        self._without_tcp = without_tcp
        self._hosts: dict[str, Host] = {}
        self._emulator: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._heard = b""

    def __enter__(self) -> Hosts:
        if reason := missing(nat=bool(self._nat)):
            raise RuntimeError(reason)
        ours, theirs = socket.socketpair()
        self._control = ours
        ours.settimeout(START_S)
        try:
            self._emulator = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
            theirs.close()
            lines = {name: asdict(line) for name, line in self._lines.items()}
            made = self._ask(
                lines=lines, nat=sorted(self._nat), seed=self._seed, without_tcp=self._without_tcp
            )
        except BaseException:
            self.close()
            raise
        for number, name in enumerate(self._lines):
            path = f"/proc/{self._emulator.pid}/fd/{made['namespaces'][name]}"
            self._hosts[name] = Host(name, _address(number), path)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def change(self, name: str, line: Line) -> None:
        """From now on this host has another line."""
        self._ask(change=name, line=asdict(line))

    def move(self, name: str) -> None:
        """The host leaves its address for another, as a laptop that changes the network; once."""
        host = self._hosts[name]
        old, host.address = host.address, _address(list(self._lines).index(name) + MOVED)
        rows = f"address del {old}/24 dev wan0\naddress add {host.address}/24 dev wan0"
        host.call(partial(_tool, ["ip", "-batch", "-"], rows))

    def split(self, *groups: Iterable[str]) -> None:
        """Only hosts of one group hear each other; no groups: all do."""
        self._ask(split=[list(group) for group in groups])

    def counts(self) -> dict[str, dict[str, int]]:
        """Per host: packets sent, lost, dropped, parted; bytes up and down."""
        found: dict[str, dict[str, int]] = self._ask(counts=True)["counts"]
        return found

    def close(self) -> None:
        """End every process of every host, then the network. Idempotent."""
        for host in self._hosts.values():
            host.close()
        self._hosts = {}
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._emulator is not None:
            try:
                self._emulator.wait(END_S)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.wait()
            self._emulator = None

    def _ask(self, **what: object) -> dict[str, Any]:  # Any: JSON
        assert self._control is not None, "not entered"
        self._control.sendall(json.dumps(what).encode() + b"\n")
        while b"\n" not in self._heard:
            chunk = self._control.recv(1 << 16)
            if not chunk:
                raise RuntimeError("the network could not be made; its reason is on stderr")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return dict(json.loads(line))


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _address(number: int) -> str:
    return f"{NETWORK}.{number + 1}"


# -- inside a namespace ----------------------------------------------------------------------------


def _libc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _enter(namespace: str) -> None:
    """Move this thread into a namespace."""
    fd = os.open(namespace, os.O_RDONLY)
    try:
        _libc("setns", fd, _CLONE_NEWNET)
    finally:
        os.close(fd)


def _tool(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")


# -- the emulator's process ------------------------------------------------------------------------


class _Emulator:
    """Holds namespaces and devices, and carries packets until its parent closes the pipe."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._heard = b""
        self._names: dict[str, int] = {}
        self._devices: list[int] = []
        self._wan = Wan([], random.Random(0))
        self._without_tcp = False

    def run(self) -> None:
        orders = self._hear()
        if orders is None:
            return
        self._make(orders)
        poll = select.epoll()
        numbers = {fd: number for number, fd in enumerate(self._devices)}
        for fd in (*numbers, self._control.fileno()):
            poll.register(fd, select.EPOLLIN)
        while True:
            due = self._wan.due()
            wait = None if due is None else max(0.0, due - time.monotonic() - EARLY_S)
            for fd, _ in poll.poll(wait):
                if fd == self._control.fileno():
                    orders = self._hear()
                    if orders is None:
                        return
                    self._tell(self._obey(orders))
                else:
                    self._read(fd, numbers[fd])
            for host, packet in self._wan.take(time.monotonic() + EARLY_S):
                with contextlib.suppress(OSError):  # the device is going down
                    os.write(self._devices[host], packet)

    def _read(self, fd: int, src: int) -> None:
        now, hosts = time.monotonic(), len(self._devices)
        for _ in range(BATCH):
            try:
                packet = os.read(fd, MTU + 64)
            except BlockingIOError:
                return
            if len(packet) < 20 or packet[0] >> 4 != 4:
                continue
            if self._without_tcp and packet[9] == socket.IPPROTO_TCP:
                continue
            if packet[16:20] == _MULTICAST_DNS:  # the hosts are neighbours, too
                for dst in range(hosts):
                    if dst != src:
                        self._wan.offer(now, src, dst, packet)
            elif packet[16:19] == _PREFIX and 0 < packet[19] % MOVED <= hosts:
                self._wan.offer(now, src, packet[19] % MOVED - 1, packet)

    def _make(self, orders: dict[str, Any]) -> None:
        made = {}
        self._without_tcp = orders["without_tcp"]
        lines = [Line(**line) for line in orders["lines"].values()]
        for number, name in enumerate(orders["lines"]):
            self._names[name] = number
            made[name] = self._make_host(number, behind_nat=name in orders["nat"])
        self._wan = Wan(lines, random.Random(orders["seed"]))
        self._tell({"namespaces": made})

    def _make_host(self, number: int, *, behind_nat: bool) -> int:
        """A namespace with a device of the network; the descriptor of where programs run."""
        inside = _new_namespace() if behind_nat else -1
        if behind_nat:
            _tool(["ip", "-batch", "-"], "link set lo up\n")
        outside = _new_namespace()
        self._devices.append(_tun("wan0"))
        rows = [
            "link set lo up",
            f"link set wan0 mtu {MTU} txqueuelen 1000",
            f"address add {_address(number)}/24 dev wan0",
            "link set wan0 up",
        ]
        if not behind_nat:
            _tool(["ip", "-batch", "-"], "\n".join(rows))
            return outside
        peer = f"/proc/{os.getpid()}/fd/{inside}"
        rows += [
            f"link add lan0 type veth peer name eth0 netns {peer}",
            f"address add {LAN}.1/24 dev lan0",
            "link set lan0 up",
        ]
        _tool(["ip", "-batch", "-"], "\n".join(rows))
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        _tool(["nft", "-f", "-"], _NAT_RULES)
        _libc("setns", inside, _CLONE_NEWNET)
        rows = [
            f"address add {LAN}.2/24 dev eth0",
            "link set eth0 up",
            f"route add default via {LAN}.1",
        ]
        _tool(["ip", "-batch", "-"], "\n".join(rows))
        return inside

    def _obey(self, orders: dict[str, Any]) -> dict[str, Any]:
        if "change" in orders:
            self._wan.change(self._names[orders["change"]], Line(**orders["line"]))
        elif "split" in orders:
            self._wan.split(numbered(self._names, orders["split"]))
        elif "counts" in orders:
            rows = {name: asdict(self._wan.counts[n]) for name, n in self._names.items()}
            return {"counts": rows}
        return {}

    def _hear(self) -> dict[str, Any] | None:
        while b"\n" not in self._heard:
            chunk = self._control.recv(1 << 16)
            if not chunk:
                return None
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return dict(json.loads(line))

    def _tell(self, what: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(what).encode() + b"\n")


def _new_namespace() -> int:
    """Move into a new namespace; a descriptor that keeps it."""
    _libc("unshare", _CLONE_NEWNET)
    with contextlib.suppress(OSError):  # a kernel without IPv6
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _tun(name: str) -> int:
    """A TUN device in the present namespace; it ends with its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    return fd


def main() -> None:
    """The emulator, on the descriptor that its parent names; ends when that is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends after the hosts, by the pipe
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _Emulator(control).run()


if __name__ == "__main__":
    main()
