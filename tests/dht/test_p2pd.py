"""What p2pd says, in plain words, and what it is started with."""

from pathlib import Path

import pytest

from dugnad.dht.p2pd import P2pdSettings, dial_reasons, listen_addresses, plain_reason

FAILED = (
    "failed to dial: failed to dial 12D3KooW: all dials failed\n"
    "  * [/ip4/192.0.2.1/tcp/1] dial tcp4 192.0.2.1:1: connect: connection refused\n"
    "  * [/ip4/192.0.2.1/udp/2/quic-v1] context deadline exceeded"
)


def test_each_address_of_a_failed_dial_has_its_reason() -> None:
    assert dial_reasons(FAILED) == [
        ("/ip4/192.0.2.1/tcp/1", "connection refused (nobody listens there)"),
        ("/ip4/192.0.2.1/udp/2/quic-v1", "no answer in time"),
    ]
    assert dial_reasons("failed to dial: dial backoff")[0][0] == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("peer id mismatch: expected A, but remote key matches B", "wrong peer id"),
        ("connect: no route to host", "no route"),
        ("failed to negotiate: protocols not supported: [/x]", "does not speak this protocol"),
        ("something  entirely\nnew", "something entirely new"),
    ],
)
def test_reasons_are_in_plain_words(message: str, words: str) -> None:
    assert words in plain_reason(message)


def settings(**changes: object) -> P2pdSettings:
    base = {"binary": Path("/b"), "identity": Path("/k"), "folder": Path("/f"), "listen": ()}
    return P2pdSettings(**{**base, **changes})  # type: ignore[arg-type]


def test_nothing_outside_is_used_unless_asked_for() -> None:
    flags = settings(listen=listen_addresses(("127.0.0.1", "::1"), 1, 2)).arguments()
    assert "-natPortMap=0" in flags
    assert "-b=0" in flags
    assert "-relay=0" in flags
    assert (
        "-hostAddrs=/ip4/127.0.0.1/tcp/1,/ip4/127.0.0.1/udp/2/quic-v1,"
        "/ip6/::1/tcp/1,/ip6/::1/udp/2/quic-v1" in flags
    )
    assert "-listen=/unix/f/p2pd.sock" in flags


def test_who_does_not_listen_is_a_client_of_the_dht() -> None:
    flags = settings(client_only=True).arguments()
    assert "-noListenAddrs=1" in flags
    assert "-dhtClient=1" in flags
    assert not any(flag.startswith("-hostAddrs") for flag in flags)
