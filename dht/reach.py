"""Reach: which addresses of others are worth trying, and which of ours others can use.

Questions to the operating system and small TCP knocks; nothing here knows libp2p.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Sequence

import psutil

from dugnad.dht.addresses import Address, parse_address
from dugnad.dht.ids import PeerId
from dugnad.dht.p2pd import SubstrateError, plain_reason

# A peer announces a few addresses; a longer list is an attempt to make us knock on many doors.
ADDRESSES_PER_PEER_MAX = 16
_PORT_TRIES = 20
ANY_HOSTS = ("0.0.0.0", "::")
"""Every interface, on purpose: peers come from outside."""


def places_of(
    peer: PeerId, addresses: Sequence[str]
) -> tuple[list[Address], list[tuple[str, str]]]:
    """The addresses that can be tried, and why the others cannot."""
    places, reasons = [], []
    for text in addresses[:ADDRESSES_PER_PEER_MAX]:
        try:
            place = parse_address(text)
        except ValueError as error:
            reasons.append((text, str(error)))
            continue
        if place.value("p2p") is not None and place.peer != peer:
            reasons.append((text, "the address names another peer"))
        else:
            places.append(place)
    return places, reasons


def by_preference(places: Sequence[Address]) -> list[list[Address]]:
    """TCP first (three times the speed of QUIC through p2pd), then QUIC, relays last."""
    relayed = [place for place in places if _is_relay(place)]
    direct = [place for place in places if place not in relayed]
    groups = (
        [place for place in direct if not place.is_quic],
        [place for place in direct if place.is_quic],
        relayed,
    )
    return [group for group in groups if group]


def _is_relay(place: Address) -> bool:
    return any(name == "p2p-circuit" for name, _ in place.parts)


async def probe_all(
    places: Sequence[Address], timeout_s: float
) -> tuple[list[Address], list[tuple[str, str]]]:
    """Which TCP addresses answer, found out at once and side by side; others pass unprobed.

    p2pd reports a failed dial only when its slowest address has failed, and then refuses to try
    the peer again for 5 s to 5 min; a refused TCP connection is known after one round trip.
    """
    verdicts = await asyncio.gather(*(_probe(place, timeout_s) for place in places))
    ok = [place for place, verdict in zip(places, verdicts, strict=True) if not verdict]
    bad = [
        (str(place), verdict) for place, verdict in zip(places, verdicts, strict=True) if verdict
    ]
    return ok, bad


async def _probe(place: Address, timeout_s: float) -> str:
    """Why nothing answers at a TCP address; empty if something does or it cannot be probed."""
    host = place.value("ip4", "ip6", "dns", "dns4", "dns6")
    port = place.value("tcp")
    if host is None or port is None or _is_relay(place):
        return ""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            family, kind, protocol, _, target = found[0]
            with socket.socket(family, kind, protocol) as knock:
                knock.setblocking(False)
                await loop.sock_connect(knock, target)
    except TimeoutError:
        return "no answer in time"
    except socket.gaierror:
        return "no such host name"
    except OSError as error:
        return plain_reason(os.strerror(error.errno or 0).lower())
    return ""


def can_bind(host: str) -> bool:
    """Whether this machine has the address at all (IPv6 may be switched off)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((host, 0))
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and ":" in host:
            return False
    return True


def free_port(hosts: Sequence[str], port: int) -> int:
    """`port` if it is free for TCP and UDP, any free one for 0. SubstrateError if it is taken.

    Asked beforehand, because p2pd shares a taken TCP port silently (SO_REUSEPORT) and then each of
    two peers gets some of the other's callers.
    """
    for _ in range(_PORT_TRIES):
        number, reason = _try_port(hosts, port)
        if not reason:
            return number
        if port:
            raise SubstrateError(reason)
    raise SubstrateError(f"no free port was found: {reason}")


def _try_port(hosts: Sequence[str], port: int) -> tuple[int, str]:
    with contextlib.ExitStack() as held:
        for host in hosts:
            if not can_bind(host):
                continue
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                trial = held.enter_context(socket.socket(family, kind))
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if kind == socket.SOCK_STREAM:  # a connection of our last life may linger
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind((host, port))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return port, f"port {port} is already in use: {host}"
                    return port, f"cannot listen on {host} port {port}: {error.strerror}"
                port = trial.getsockname()[1]
    return port, ""


def on_interfaces(address: Address) -> list[Address]:
    """An unspecified address becomes one for each interface of that family; others stay."""
    host = address.value("ip4", "ip6")
    if host not in ANY_HOSTS:
        return [address]
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == family and "%" not in entry.address
    ]
    return [address.with_host(text) for text in found]


def is_loopback(address: Address) -> bool:
    """Whether only this machine can use the address."""
    host = address.value("ip4", "ip6") or ""
    return host.startswith("127.") or host == "::1"
