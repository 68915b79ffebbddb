"""One link of so many Mbit/s for each peer: namespaces on a bridge. Needs root, leaves nothing.

    with Lan(4, 1000.0) as lan:
        subprocess.Popen([*lan.enter(0), "dugnad", ...])  # at lan.address(0)

The bridge lies in a namespace of its own. Rates are the kernel's token buckets, at both ends of
each pair, so both directions are limited.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final

PEERS_MAX: Final = 64
_NETWORK: Final = "10.193.0"
"""Private addresses: hivemind's peers found no group with those that RFC 2544 set aside."""
_BUCKET: Final = "burst 256kb latency 50ms"
"""Several of the largest packets that the kernel hands over at once (64 KiB)."""


def missing() -> str:
    """Why no such network can be made here; '' when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    lacking = [one for one in ("ip", "tc") if shutil.which(one) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (package iproute2)"
    try:
        with Lan(1, 1000.0):
            return ""
    except RuntimeError as fault:
        return str(fault)


class Lan:
    """The network, from `with` to its end. RuntimeError when it cannot be made."""

    def __init__(self, peers: int, mbit: float) -> None:
        if not 1 <= peers <= PEERS_MAX:
            raise ValueError(f"{peers} peers, 1 to {PEERS_MAX} fit the network")
        self._peers, self._mbit = peers, mbit
        self._switch = f"bench{os.getpid()}"

    def address(self, rank: int) -> str:
        """Of a peer, in its namespace."""
        return f"{_NETWORK}.{rank + 1}"

    def interface(self) -> str:
        """The name of a peer's end of its link."""
        return "wire"

    def enter(self, rank: int) -> list[str]:
        """What stands before a command that is to run there."""
        return ["ip", "netns", "exec", self._name(rank)]

    def __enter__(self) -> Lan:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as fault:
            self._remove()
            words = getattr(fault, "stderr", "") or str(fault)
            raise RuntimeError(f"no network could be made: {words.strip()}") from None
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _name(self, rank: int) -> str:
        return f"{self._switch}-{rank}"

    def _make(self) -> None:
        switch, rate = self._switch, f"rate {self._mbit:g}mbit {_BUCKET}"
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add lan type bridge")
        _run(f"ip -n {switch} link set lan up")
        for rank in range(self._peers):
            name, port = self._name(rank), f"port{rank}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {switch} link add {port} type veth peer name wire netns {name}")
            _run(f"ip -n {switch} link set {port} master lan up")
            _run(f"ip -n {name} address add {self.address(rank)}/24 dev wire")
            _run(f"ip -n {name} link set wire up")
            _run(f"ip -n {name} link set lo up")
            _run(f"tc -n {switch} qdisc add dev {port} root tbf {rate}")
            _run(f"tc -n {name} qdisc add dev wire root tbf {rate}")

    def _remove(self) -> None:
        """Links and rates end with their namespace."""
        for name in (*map(self._name, range(self._peers)), self._switch):
            if Path("/run/netns", name).exists():
                with contextlib.suppress(OSError, subprocess.CalledProcessError):
                    _run(f"ip netns delete {name}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)
