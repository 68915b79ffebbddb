"""Links: `dugnad:<run id>?peer=<multiaddr>&peer=…`, what people pass on to invite to a run.

Links travel through chats, mails and shells, which cut and mangle them: each way has its own
error, with what to do about it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from dugnad.dht.addresses import parse_address
from dugnad.dht.ids import RUN_TEXT_LENGTH, RunId, parse_run, run_text

SCHEME = "dugnad:"
# A chat message holds a link of this size; more seeds than this help nobody.
LINK_CHARS_MAX = 4096
LINK_PEERS_MAX = 16

_AGAIN = "ask for the link again and copy all of it"


class LinkError(Exception):
    """A link that cannot be used: `reason` says what is wrong with it, `fix` what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason} ({fix})")
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Link:
    """A run and the multiaddrs, each with its `/p2p/<id>`, of peers that were there."""

    run: RunId
    peers: tuple[str, ...] = ()


def format_link(run: RunId, peers: Sequence[str]) -> str:
    """The link as text. Addresses beyond `LINK_PEERS_MAX` are left out."""
    query = "&".join(f"peer={address}" for address in list(peers)[:LINK_PEERS_MAX])
    return f"{SCHEME}{run_text(run)}" + (f"?{query}" if query else "")


def parse_link(text: str) -> Link:
    """The link in `text`; LinkError, with what to do, if it was cut or mangled."""
    text = text.strip().strip("<>\"'")
    if len(text) > LINK_CHARS_MAX:
        raise LinkError(f"the link has {len(text)} characters, too many for a link", _AGAIN)
    if re.search(r"\s", text):
        raise LinkError("the link holds a space or a new line", "make it one line, in quotes")
    if not text.lower().startswith(SCHEME):
        raise LinkError(f"a link starts with {SCHEME!r}, this starts with {text[:12]!r}", _AGAIN)
    if "&amp;" in text:
        raise LinkError("the link holds '&amp;'", "replace each '&amp;' by '&'")
    name, _, query = text[len(SCHEME) :].removeprefix("//").partition("?")
    return Link(_run_in(name.rstrip("/")), _peers_in(query))


def _run_in(name: str) -> RunId:
    if len(name) < RUN_TEXT_LENGTH:
        missing = RUN_TEXT_LENGTH - len(name)
        raise LinkError(f"the run id in the link is {missing} characters too short", _AGAIN)
    try:
        return parse_run(name)
    except ValueError as error:
        raise LinkError(f"the run id in the link is wrong: {error}", _AGAIN) from None


def _peers_in(query: str) -> tuple[str, ...]:
    peers: list[str] = []
    for field in query.split("&") if query else []:
        name, equals, value = field.partition("=")
        if name != "peer" or not equals:
            raise LinkError(f"{field[:40]!r} in the link is not 'peer=<address>'", _AGAIN)
        address = _address_in(unquote(value))
        if address not in peers:
            peers.append(address)
    if len(peers) > LINK_PEERS_MAX:
        raise LinkError(
            f"the link names {len(peers)} peers, at most {LINK_PEERS_MAX} are allowed",
            "remove some of its 'peer=' parts",
        )
    return tuple(peers)


def _address_in(text: str) -> str:
    try:
        address = parse_address(text)
    except ValueError as error:
        raise LinkError(f"a peer's address in the link is wrong: {error}", _AGAIN) from None
    if address.parts[-1][0] != "p2p":
        raise LinkError(f"the link ends before the peer's id (after {text[-20:]!r})", _AGAIN)
    if address.peer is None:
        raise LinkError("a peer's id in the link is cut short or not of this network", _AGAIN)
    return str(address)
