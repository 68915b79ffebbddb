"""What a peer tells an observer: who is here, what was measured, and how the run stands.

Adverts carry their makers' signatures; the rest is the word of the peer that was asked, as much as
its own page is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from dugnad.dht.advert import ADVERT_BYTES_MAX, Advert
from dugnad.dht.ids import KEY_BYTES, PeerId
from dugnad.dht.messages import PEERS_KNOWN_MAX
from dugnad.dht.records import RecordError, decode, encode
from dugnad.dht.roster_table import State
from dugnad.peer import clock

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

LEFT_MAX: Final = 64
"""Peers named as having left: a whole mesh."""
LEFT_S: Final = 120.0
"""A good-bye is told for so long: an observer asks every few seconds."""
TEXT_CHARS_MAX: Final = 300
NEWS_BYTES_MAX: Final = (PEERS_KNOWN_MAX + 1) * (ADVERT_BYTES_MAX + 8) + 8192
"""Everybody's adverts, and a page of text."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Peer = Annotated[PeerId, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]


class News(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer to :class:`~dugnad.peer.transferwire.GetNews`. Losses are nats a token."""

    adverts: Annotated[tuple[Advert, ...], msgspec.Meta(max_length=PEERS_KNOWN_MAX + 1)]
    """The teller's own first, then those of the peers that it holds live streams with."""
    left: Annotated[tuple[_Peer, ...], msgspec.Meta(max_length=LEFT_MAX)] = ()
    """Peers that said good-bye lately."""
    tokens: _Count = 0
    train_loss: float | None = None
    held_out_tokens: _Count = 0
    """What the swarm had merged when the agreed parameters were scored."""
    held_out_loss: float | None = None
    ended: _Text = ""
    """Why nothing is merged any more; '' while it goes on."""
    sample: _Text = ""
    sample_merges: _Count = 0
    sample_tokens: _Count = 0


def decode_news(data: bytes) -> News:
    """News from foreign bytes; RecordError when they are none. Adverts are not verified here."""
    news = decode(data, News, NEWS_BYTES_MAX)
    losses = [loss for loss in (news.train_loss, news.held_out_loss) if loss is not None]
    if not all(map(math.isfinite, losses)):
        raise RecordError("a loss that is no number")
    return news


def news_of(daemon: Daemon) -> News:
    """What this daemon tells now, from memory."""
    roster, vitals = daemon.swarm.roster, daemon.vitals
    adverts: list[Advert] = []
    left: list[PeerId] = []
    if roster is not None:
        live = [roster.advert(peer) for peer in daemon.averager.live()]
        adverts = [roster.my_advert, *(one for one in live if one is not None)]
        now = clock.now()
        standing = ((peer, roster.state(peer)) for peer in roster.known())
        left = [p for p, s in standing if s.state is State.LEFT and now - s.since < LEFT_S]
    scored = vitals.anchor_losses[-1] if vitals.anchor_losses else None
    sample = daemon.page.feed.state().sample if daemon.page is not None else None
    return News(
        adverts=tuple(adverts[: PEERS_KNOWN_MAX + 1]),
        left=tuple(left[:LEFT_MAX]),
        tokens=vitals.swarm_tokens,
        train_loss=_finite(daemon.training.loss),
        held_out_tokens=scored[0] if scored is not None else 0,
        held_out_loss=_finite(scored[1]) if scored is not None else None,
        ended=vitals.end.reason()[:TEXT_CHARS_MAX] if vitals.end.over() else "",
        sample=sample.text[:TEXT_CHARS_MAX] if sample is not None else "",
        sample_merges=sample.step if sample is not None else 0,
        sample_tokens=sample.tokens if sample is not None else 0,
    )


def encoded_news(daemon: Daemon) -> bytes:
    """:func:`news_of` as bytes."""
    return encode(news_of(daemon))


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
