"""From what a daemon knows to what a dashboard is told: each function makes one kind of news.

Pure apart from reading the daemon's memory; nothing here waits. Times are given by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from dugnad.averaging import events as averaging
from dugnad.averaging import formats as fm
from dugnad.averaging.node import Node
from dugnad.dashboard import events as ev
from dugnad.dashboard.text import bytes_text
from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId, RunId, name_of, peer_text, run_text
from dugnad.dht.roster_table import State
from dugnad.peer.manifest import Manifest

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

FLOAT_BYTES: Final = 4
DEVICES_SHOWN: Final = 2
"""Kinds of devices named for one machine; more do not fit a cell."""
UNREACHED_S: Final = 30.0
"""A peer that was named and not reached for so long is shown, with the reason."""

_STREAM_ENDED: Final = "stream ended: "
"""How the roster begins when it says how a stream ended, which is of no use to a reader."""
_ADDRESS: Final = re.compile(
    r"/(?:ip[46]|dns[46a-z]*)/\S+|\[?[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*\]?(?::\d+)?"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
)
"""Multiaddrs, IPv6 and IPv4 addresses."""
_HERE: Final = frozenset({State.LIVE, State.INDIRECT, State.SUSPECT})
_DOES: Final = (("evaluate", "evaluating"), ("prepare", "preparing"))


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment on both clocks: monotonic seconds, and milliseconds of the wall's."""

    now: float
    wall_ms: int

    def wall_of(self, then: float) -> int:
        """The wall clock at a moment of the monotonic one."""
        return self.wall_ms + round((then - self.now) * 1000.0)


def without_addresses(text: str) -> str:
    """`text` with network addresses left out: whoever lends a machine did not publish where it is.

    The one exception is the link to join, which is made of addresses.
    """
    return _ADDRESS.sub("(address)", text)


def why_gone(reason: str) -> str:
    """Why a peer is not here any more, in plain words and without addresses."""
    if reason.startswith(_STREAM_ENDED):
        return "its connection ended"
    return without_addresses(reason)


def own_state(daemon: Daemon) -> tuple[str, str]:
    """State and reason of this daemon, for strangers."""
    return public_state(*daemon.report.state())


def public_state(state: str, reason: str) -> tuple[str, str]:
    """A daemon's state and reason, for strangers: what a fault says can hold paths."""
    if state == "error":
        return state, "its learner stopped; its owner sees why"
    for private in ("pause_while", "only_when_idle", "gpu_only_when_idle", "failures"):
        if reason.startswith(private):  # what its owner does is nobody's business
            return state, private
    return state, without_addresses(reason)


def run_described(manifest: Manifest, run: RunId, link: str, wall_ms: int) -> ev.RunDescribed:
    """What is trained, as the manifest has it."""
    model, data, exchange = manifest.model, manifest.data, manifest.exchange
    organiser = PeerId(manifest.organiser)
    return ev.RunDescribed(
        at_ms=wall_ms,
        run=run_text(run),
        name=manifest.name,
        purpose=manifest.purpose,
        licence=manifest.licence,
        organiser=f"{name_of(organiser)} ({peer_text(organiser)[-6:]})",
        created_ms=manifest.created_ms,
        parameters=model.parameter_count(),
        model=(
            ("Model", "decoder of the Llama family, on bytes"),
            ("Width and layers", f"{model.dim}, {model.layers}"),
            ("Attention heads", f"{model.heads}, {model.key_value_heads} for keys and values"),
            ("Hidden width", f"{model.hidden}"),
            ("Context", f"{model.context} bytes"),
            ("Inner batch", f"{manifest.batch_sequences} sequences"),
            ("Hand-ins and merges", f"{exchange.hand_in_codec}, {exchange.commit_codec}"),
            ("Who may join", "everybody" if not manifest.admission else "whom the organiser lists"),
        ),
        data=(
            ("Data", data.kind),
            ("Data size", bytes_text(data.index.size)),
            ("Trained on", f"{data.held_out_start} sequences of {data.context} bytes"),
            ("Held out", f"{data.sequences - data.held_out_start} sequences"),
            ("Data root", data.root.hex()),
        ),
        token_budget=manifest.token_budget,
        link=link,
        fragments=manifest.table.sizes,
    )


def peer_rows(daemon: Daemon, listed: dict[str, int], at: Moment) -> Iterator[ev.PeerRow]:
    """This peer, the live ones, and those that were named and cannot be reached."""
    roster = daemon.swarm.roster
    live = daemon.averager.live()
    for peer in (daemon.identity.peer, *live):
        yield peer_row(daemon, peer, listed, at)
    if roster is None:
        return
    here = {daemon.identity.peer, *live}
    for peer in roster.known():
        state = roster.state(peer)
        unreached = state.state in (State.KNOWN, State.REFUSED)
        if peer not in here and unreached and at.now - UNREACHED_S > state.since > 0.0:
            yield peer_row(daemon, peer, listed, at)


def peer_row(daemon: Daemon, peer: PeerId, listed: dict[str, int], at: Moment) -> ev.PeerRow:
    """One peer, as this daemon sees it now."""
    roster, text = daemon.swarm.roster, peer_text(peer)
    advert = roster.advert(peer) if roster is not None else None
    mine = peer == daemon.identity.peer
    if mine:
        state, reason = own_state(daemon)
        since, seen, link, here = daemon.started_at, at.now, _link(advert, True), True
        name = daemon.settings.name or name_of(peer)
    else:
        state, reason, since, seen, here = _standing(daemon, peer, advert, at)
        link, name = _link(advert, here), name_of(peer)
    return ev.PeerRow(
        peer=text,
        name=advert.label if advert is not None else name,
        roles=advert.roles if advert is not None else (),
        device=devices_text(advert),
        tokens_per_s=_speed(daemon, advert, mine=mine, here=here),
        link=link,
        codec=daemon.links.carried_to(peer).codec,
        bits=round(daemon.links.carried_to(peer).bits, 3),
        saved_bytes=daemon.links.carried_to(peer).saved_bytes,
        link_bytes_per_s=float(f"{daemon.links.rate(peer):.2g}"),
        state=state,
        reason=why_gone(reason),
        since_ms=at.wall_of(since),
        last_seen_ms=at.wall_of(seen) if seen else 0,
        listed_tokens=listed.get(text, 0),
        version=advert.software if advert is not None else "",
        region=advert.region if advert is not None else "",
        gone_ms=0 if here else at.wall_of(since),
    )


def lasting(row: ev.PeerRow | None) -> ev.PeerRow | None:
    """``row`` without times, which the rounding of two clocks changes, too."""
    if row is None:
        return None
    gone = int(row.gone_ms > 0)
    return msgspec.structs.replace(row, last_seen_ms=0, since_ms=0, gone_ms=gone)


def _speed(daemon: Daemon, advert: Advert | None, *, mine: bool, here: bool) -> float:
    if mine:
        return float(f"{daemon.training.tokens_per_s:.3g}")
    return advert.tokens_per_s if here and advert is not None else 0.0


def _standing(
    daemon: Daemon, peer: PeerId, advert: Advert | None, at: Moment
) -> tuple[str, str, float, float, bool]:
    """(state, reason, since, last seen or 0, whether it is here) of another peer."""
    if daemon.swarm.roster is None:
        return "unknown", "", at.now, 0.0, False
    known = daemon.swarm.roster.state(peer)
    since = known.since if known.since > 0.0 else at.now
    seen = known.last_seen or 0.0
    if known.state is State.KNOWN:
        return "unreachable", known.reason, since, seen, False
    if known.state not in _HERE:
        return known.state.value, known.reason, since, seen, False
    if known.state is not State.LIVE:
        return known.state.value, known.reason, since, seen, True
    if advert is not None and "train" not in advert.roles:
        found = (word for role, word in _DOES if role in advert.roles)
        return next(found, "resting"), "", since, seen, True
    if advert is None or advert.tokens_per_s <= 0.0:
        return "here", "it has told no speed yet", since, seen, True
    return "training", "", since, seen, True


def _link(advert: Advert | None, here: bool) -> ev.Link:
    said: ev.Link = advert.reachable if advert is not None else "unknown"
    return "direct" if said == "unknown" and here else said


def devices_text(advert: Advert | None) -> str:
    """The devices that an advert names, in a few words."""
    if advert is None:
        return ""
    named = [
        f"{one.count} × {one.kind}" + (f" {one.name}" if one.name else "")
        for one in advert.devices[:DEVICES_SHOWN]
    ]
    return ", ".join(named)


def adopted_heads(
    daemon: Daemon, p: int, action: averaging.Adopt, wall_ms: int
) -> Iterator[ev.HeadAdopted]:
    """The merges of fragment ``p`` that led to its new head, oldest first."""
    lineage = daemon.averager.fragments[p].core.view.lineage
    nodes: list[Node | None]
    if action.gap:
        nodes = [lineage.get(action.digest)]
    else:
        names = (fm.header_digest(one.header, daemon.run_id) for one in action.applied)
        nodes = [lineage.get(name) for name in names]
    for node in nodes:
        if node is not None and node.record is not None:
            yield head_adopted(daemon.manifest, p, node, node.record, wall_ms)


def head_adopted(
    manifest: Manifest, p: int, node: Node, record: fm.CommitRecord, wall_ms: int
) -> ev.HeadAdopted:
    """One merge. Each sequence is handed in once for each fragment, so a fragment tells its share
    of the tokens, and the fragments of a round tell all of them.
    """
    header, fragments = record.header, len(manifest.table.fragments)
    whole = FLOAT_BYTES * manifest.table.sizes[p]
    counted = [one.contribution for one in record.inputs if not one.refusal]
    sent = sum(min(one.payload_bytes, whole) for one in counted)
    return ev.HeadAdopted(
        at_ms=min(header.time_ms, wall_ms),
        fragment=p,
        version=header.version,
        digest=node.digest.hex(),
        home=peer_text(PeerId(header.home)),
        tokens_total=header.tokens_total,
        listed=tuple(
            (peer_text(PeerId(peer)), tokens * (p + 1) // fragments - tokens * p // fragments)
            for peer, tokens in sorted(node.weights.items())
        ),
        sent_bytes=sent + min(header.payload_bytes, whole),
        plain_bytes=whole * (len(counted) + 1),
    )


def standing_head(p: int, node: Node, wall_ms: int) -> ev.HeadAdopted | None:
    """Where a fragment stands when the page begins: its merge is in the history already, or before
    it.
    """
    if node.record is None:
        return None
    header = node.record.header
    return ev.HeadAdopted(
        at_ms=min(header.time_ms, wall_ms),
        fragment=p,
        version=header.version,
        digest=node.digest.hex(),
        home=peer_text(PeerId(header.home)),
        tokens_total=header.tokens_total,
    )
