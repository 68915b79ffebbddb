"""Links: there and back, and an own error for each way in which they are cut or mangled."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht.ids import PeerId, RunId, peer_text, run_text
from dugnad.dht.link import LINK_PEERS_MAX, Link, LinkError, format_link, parse_link

RUN = RunId(bytes(range(32)))
PEERS = tuple(f"/ip4/192.0.2.{n}/tcp/4001/p2p/{peer_text(PeerId(bytes([n]) * 32))}" for n in (1, 2))
TEXT = format_link(RUN, PEERS)


def test_a_link_is_written_as_promised_and_comes_back() -> None:
    assert f"dugnad:{run_text(RUN)}?peer={PEERS[0]}&peer={PEERS[1]}" == TEXT
    assert parse_link(TEXT) == Link(RUN, PEERS)
    assert parse_link(format_link(RUN, ())) == Link(RUN)


@pytest.mark.parametrize(
    "text",
    [
        f"  {TEXT}\n",
        f"<{TEXT}>",
        f'"{TEXT}"',
        TEXT.replace("dugnad:", "dugnad://").replace("?", "/?"),
        TEXT.replace("dugnad", "DUGNAD"),
        TEXT.replace("/ip4", "%2Fip4"),
        f"{TEXT}&peer={PEERS[0]}",
    ],
)
def test_harmless_changes_are_understood(text: str) -> None:
    assert parse_link(text) == Link(RUN, PEERS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "starts with"),
        ("https://example.org", "starts with 'dugnad:', this starts with 'https://exam'"),
        ("dugnad:", "52 characters too short"),
        (TEXT[:30], "29 characters too short"),
        (TEXT.replace("?", "x?"), "run id in the link is wrong"),
        (f"dugnad:{'1' * 52}", "letters a to z"),
        (TEXT[:-1], "cut short"),
        (TEXT[:-60], "ends before the peer's id|ends after /p2p"),
        (TEXT.replace("&", "&amp;"), "'&amp;'"),
        (TEXT.replace("&", " &"), "a space or a new line"),
        (TEXT.replace("&", "\n&"), "a space or a new line"),
        (TEXT + "&colour=red", "'colour=red' in the link is not"),
        (TEXT + "&", "is not 'peer=<address>'"),
        (TEXT.replace("4001", "99999"), "above 65535"),
        (format_link(RUN, ["/ip4/192.0.2.1/tcp/4001"]), "ends before the peer's id"),
        ("dugnad:" + "a" * 5000, "too many for a link"),
    ],
)
def test_each_mangled_link_has_its_own_reason_and_fix(text: str, reason: str) -> None:
    with pytest.raises(LinkError, match=reason) as caught:
        parse_link(text)
    assert caught.value.fix


def test_every_cut_of_a_link_is_noticed_or_still_a_link() -> None:
    whole = {len(f"dugnad:{run_text(RUN)}"), len(format_link(RUN, PEERS[:1])), len(TEXT)}
    whole.add(len(f"dugnad:{run_text(RUN)}?"))
    for length in range(len(TEXT)):
        with contextlib.suppress(LinkError):
            parse_link(TEXT[:length])
            assert length in whole


def test_too_many_peers_are_refused_and_never_written() -> None:
    many = [f"/ip4/192.0.2.1/tcp/{n}/p2p/{peer_text(PeerId(bytes(32)))}" for n in range(1, 40)]
    assert len(parse_link(format_link(RUN, many)).peers) == LINK_PEERS_MAX
    text = f"{format_link(RUN, ())}?" + "&".join(f"peer={peer}" for peer in many)
    with pytest.raises(LinkError, match="at most 16"):
        parse_link(text)


@given(st.text(max_size=120))
def test_parsing_raises_nothing_but_link_errors(text: str) -> None:
    for candidate in (text, f"dugnad:{text}", f"dugnad:{run_text(RUN)}?{text}"):
        with contextlib.suppress(LinkError):
            parse_link(candidate)
