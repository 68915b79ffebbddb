"""The state as JSON, for programs: the same facts as the pages."""

from __future__ import annotations

from typing import Final

import msgspec

from dugnad.dashboard import events as ev
from dugnad.dashboard.history import Happening
from dugnad.dashboard.layout import View
from dugnad.dashboard.live import Hub
from dugnad.dashboard.series import Series
from dugnad.dashboard.state import FragmentHead

FORMAT: Final = 1
HAPPENINGS_SHOWN: Final = 100


class Newest(msgspec.Struct, frozen=True):
    """The newest value of a measurement; all of them are in `/api/chart/<name>.csv`."""

    at_ms: int
    tokens: int
    value: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is known now. `next` is where to go on in `/api/v1/events?after=…`.

    Times are milliseconds since 1970, losses nats a token; None where nothing was measured.
    """

    format: int
    next: str
    as_of_ms: int
    run: ev.RunDescribed | None
    serving: ev.Status | None
    ended: ev.RunEnded | None
    tokens: int
    merges: int
    live: int
    next_merge_ms: int | None
    sent_bytes: int
    plain_bytes: int
    train_loss: Newest | None
    held_out_loss: Newest | None
    tokens_per_s: Newest | None
    fragments: dict[int, FragmentHead]
    units: dict[str, int]
    evaluated: tuple[ev.EvaluatedRow, ...]
    prepared: tuple[ev.PreparedRow, ...]
    peers: list[ev.PeerRow]
    happenings: tuple[Happening, ...]
    sample: ev.SampleText | None


def snapshot(view: View, hub: Hub) -> bytes:
    """The JSON bytes."""
    state, history = view.state, view.state.history
    due = state.next_due(view.now_ms)
    return msgspec.json.encode(
        Snapshot(
            format=FORMAT,
            next=etag(hub, state.events),
            as_of_ms=state.as_of_ms,
            run=state.run,
            serving=state.serving,
            ended=state.ended,
            tokens=state.tokens,
            merges=state.merges,
            live=state.live,
            next_merge_ms=due[0] if due is not None else None,
            sent_bytes=history.sent_bytes,
            plain_bytes=history.plain_bytes,
            train_loss=_newest(history.train),
            held_out_loss=_newest(history.held_out),
            tokens_per_s=_newest(history.speed),
            fragments=dict(state.heads),
            units=dict(state.units),
            evaluated=state.evaluated,
            prepared=state.prepared,
            peers=list(state.peers.values()),
            happenings=state.happenings[-HAPPENINGS_SHOWN:],
            sample=state.sample,
        )
    )


def etag(hub: Hub, n: int) -> str:
    """The name of the state after `n` events of this process."""
    return f"{hub.session}-{n}"


def _newest(series: Series) -> Newest | None:
    last = series.last
    return Newest(last.at_ms, last.tokens, last.value) if last is not None else None
