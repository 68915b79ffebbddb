"""What a dashboard is told: one struct for each kind of news. A state is the fold of these.

Times are milliseconds since 1970 (UTC), tokens are tokens merged by the run. Text may be foreign:
`clean` makes it printable, and the fold applies `clean` to whatever it is given.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dugnad.averaging.board import Board, BoardRow
from dugnad.dashboard.text import (
    LINE_CHARS_MAX,
    NAME_CHARS_MAX,
    PARAGRAPH_CHARS_MAX,
    WORD_CHARS_MAX,
    line,
    paragraph,
)

LINK_CHARS_MAX: Final = 2000
"""A link with a handful of seeds."""
FACTS_MAX: Final = 24
ROLES_MAX: Final = 8
FRAGMENTS_MAX: Final = 4096
"""Rows of the fragment table; more would be no table for people."""
EVALUATORS_MAX: Final = 100
"""Evaluators shown, and preparers: more than a page of them."""
LISTED_MAX: Final = 256
"""Contributors told about with one merge; the rest count as others."""

Link = Literal["direct", "relayed", "outbound", "unknown"]


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer as the serving daemon sees it. Empty text and zero mean unknown.

    `state` is one word, `reason` why it is not training or cannot be reached. A peer that is gone
    has `gone_ms`.
    """

    peer: str
    name: str
    roles: tuple[str, ...] = ()
    device: str = ""
    tokens_per_s: float = 0.0
    link: Link = "unknown"
    codec: str = ""
    """Of the newest hand-in over the link from the serving daemon; the next three, too."""
    bits: float = 0.0
    """Bits a parameter."""
    saved_bytes: int = 0
    """Against float32."""
    link_bytes_per_s: float = 0.0
    state: str = "unknown"
    reason: str = ""
    since_ms: int = 0
    last_seen_ms: int = 0
    listed_tokens: int = 0
    version: str = ""
    region: str = ""
    gone_ms: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something that a dashboard shows. `at_ms` is when it happened."""

    at_ms: int


class RunDescribed(Event, frozen=True, kw_only=True, tag="run"):
    """What is trained. `model` and `data` are facts in the order to show them, (label, value)."""

    run: str
    name: str
    purpose: str = ""
    licence: str = ""
    organiser: str = ""
    created_ms: int = 0
    parameters: int = 0
    model: tuple[tuple[str, str], ...] = ()
    data: tuple[tuple[str, str], ...] = ()
    token_budget: int = 0
    link: str = ""
    fragments: tuple[int, ...] = ()
    """Parameters of each fragment."""


class PeerSeen(Event, frozen=True, kw_only=True, tag="peer_seen"):
    """A peer came, or came back."""

    row: PeerRow


class PeerGone(Event, frozen=True, kw_only=True, tag="peer_gone"):
    """A peer left (`how` is left) or vanished (`how` is lost)."""

    peer: str
    how: Literal["left", "lost"]
    reason: str = ""


class PeerChanged(Event, frozen=True, kw_only=True, tag="peers"):
    """What is known of some peers now; peers that are not named stay as they are."""

    rows: tuple[PeerRow, ...]


class HeadAdopted(Event, frozen=True, kw_only=True, tag="head"):
    """A fragment has a new version. `listed` are (peer, tokens) of the contributions in it.

    `tokens_total` is what the run has merged with it. `sent_bytes` of this merge's contributions
    and payload would have been `plain_bytes` as float32.
    """

    fragment: int
    version: int
    digest: str
    home: str
    tokens_total: int
    listed: tuple[tuple[str, int], ...] = ()
    sent_bytes: int = 0
    plain_bytes: int = 0


class TrainLoss(Event, frozen=True, kw_only=True, tag="train_loss"):
    """Mean training loss, nats a token, when the run had merged `tokens`."""

    tokens: int
    loss: float


class HeldOutLoss(Event, frozen=True, kw_only=True, tag="held_out_loss"):
    """Loss of the agreed parameters on text that nobody trains on, nats a token."""

    tokens: int
    loss: float


class Throughput(Event, frozen=True, kw_only=True, tag="throughput"):
    """Tokens a second of the whole swarm."""

    tokens_per_s: float


class MergeDue(Event, frozen=True, kw_only=True, tag="merge_due"):
    """When the next merge of a fragment is expected (`due_ms`)."""

    fragment: int
    due_ms: int


class Happened(Event, frozen=True, kw_only=True, tag="happened"):
    """Something in plain words."""

    kind: str
    text: str


class UnitsMoved(Event, frozen=True, kw_only=True, tag="units_moved"):
    """Work units of a departed peer were taken over."""

    units: int
    source: str
    target: str


class UnitCounts(Event, frozen=True, kw_only=True, tag="units"):
    """Work units by state, in the order to show them."""

    counts: tuple[tuple[str, int], ...]


class BoardComputed(Event, frozen=True, kw_only=True, tag="board"):
    """The leaderboard, and of how many peers the receipts of this peer are."""

    board: Board
    peers_heard: int = 0
    peers_known: int = 0


class EvaluatedRow(msgspec.Struct, frozen=True):
    """Held-out tokens that a peer scored: confirmed by another, not yet, and contradicted."""

    peer: str
    confirmed: int
    pending: int
    disputed: int


class Evaluations(Event, frozen=True, kw_only=True, tag="evaluations"):
    """What evaluators earned, most first."""

    rows: tuple[EvaluatedRow, ...]


class PreparedRow(msgspec.Struct, frozen=True):
    """Tokens of units that a peer prepared: confirmed by another, not yet, and contradicted."""

    peer: str
    confirmed: int
    pending: int
    disputed: int


class Preparations(Event, frozen=True, kw_only=True, tag="preparations"):
    """What preparers earned, most first."""

    rows: tuple[PreparedRow, ...]


class SampleText(Event, frozen=True, kw_only=True, tag="sample"):
    """Text that the current model wrote when the run had made `step` merges."""

    text: str
    prompt: str = ""
    step: int = 0
    tokens: int = 0


class Status(Event, frozen=True, kw_only=True, tag="status"):
    """The peer that serves this page: who it is and what it does. `reason` says why not training.

    Sent often enough (each 15 s or so) it also is the sign of life that keeps a page from stale.
    """

    peer: str
    name: str
    state: str
    reason: str = ""


class RunEnded(Event, frozen=True, kw_only=True, tag="ended"):
    """Nothing is merged any more, and why."""

    reason: str


AnyEvent = (
    RunDescribed
    | PeerSeen
    | PeerGone
    | PeerChanged
    | HeadAdopted
    | TrainLoss
    | HeldOutLoss
    | Throughput
    | MergeDue
    | Happened
    | UnitsMoved
    | UnitCounts
    | BoardComputed
    | Evaluations
    | Preparations
    | SampleText
    | Status
    | RunEnded
)


def clean_row(row: PeerRow) -> PeerRow:
    """`row` with printable, bounded text."""
    return PeerRow(
        peer=line(row.peer, 64),
        name=line(row.name, NAME_CHARS_MAX),
        roles=tuple(line(role, 16) for role in row.roles[:ROLES_MAX]),
        device=line(row.device, WORD_CHARS_MAX),
        tokens_per_s=max(row.tokens_per_s, 0.0),
        link=row.link,
        codec=line(row.codec, 16),
        bits=max(row.bits, 0.0),
        saved_bytes=max(row.saved_bytes, 0),
        link_bytes_per_s=max(row.link_bytes_per_s, 0.0),
        state=line(row.state, WORD_CHARS_MAX),
        reason=line(row.reason),
        since_ms=row.since_ms,
        last_seen_ms=row.last_seen_ms,
        listed_tokens=row.listed_tokens,
        version=line(row.version, WORD_CHARS_MAX),
        region=line(row.region, WORD_CHARS_MAX),
        gone_ms=row.gone_ms,
    )


def clean(event: AnyEvent) -> AnyEvent:
    """`event` with all its text printable and within limits, and its lists within theirs."""
    changed = msgspec.structs.replace
    match event:
        case RunDescribed():
            return _clean_run(event)
        case PeerSeen():
            return changed(event, row=clean_row(event.row))
        case PeerGone():
            return changed(event, peer=line(event.peer, 64), reason=line(event.reason))
        case PeerChanged():
            return changed(event, rows=tuple(map(clean_row, event.rows)))
        case HeadAdopted():
            return changed(
                event,
                digest=line(event.digest, 64),
                home=line(event.home, 64),
                listed=tuple((line(p, 64), max(t, 0)) for p, t in event.listed[:LISTED_MAX]),
            )
        case Happened():
            return changed(event, kind=line(event.kind, WORD_CHARS_MAX), text=line(event.text))
        case UnitsMoved():
            source, target = line(event.source, 48), line(event.target, 48)
            return changed(event, source=source, target=target)
        case UnitCounts():
            counts = tuple((line(k, WORD_CHARS_MAX), n) for k, n in event.counts[:FACTS_MAX])
            return changed(event, counts=counts)
        case BoardComputed():
            return changed(event, board=_clean_board(event.board))
        case Evaluations():
            rows = tuple(changed(r, peer=line(r.peer, 64)) for r in event.rows[:EVALUATORS_MAX])
            return changed(event, rows=rows)
        case Preparations():
            made = tuple(changed(r, peer=line(r.peer, 64)) for r in event.rows[:EVALUATORS_MAX])
            return changed(event, rows=made)
        case SampleText():
            return changed(event, text=paragraph(event.text), prompt=paragraph(event.prompt, 400))
        case Status():
            return changed(
                event,
                peer=line(event.peer, 64),
                name=line(event.name, NAME_CHARS_MAX),
                state=line(event.state, WORD_CHARS_MAX),
                reason=line(event.reason),
            )
        case RunEnded():
            return changed(event, reason=line(event.reason))
        case _:
            return event  # numbers only


def _clean_run(event: RunDescribed) -> RunDescribed:
    def facts(rows: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((line(k, WORD_CHARS_MAX), line(v)) for k, v in rows[:FACTS_MAX])

    return msgspec.structs.replace(
        event,
        run=line(event.run, 64),
        name=line(event.name, 80),
        purpose=paragraph(event.purpose, PARAGRAPH_CHARS_MAX),
        licence=line(event.licence, LINE_CHARS_MAX),
        organiser=line(event.organiser, 80),
        model=facts(event.model),
        data=facts(event.data),
        link=line(event.link, LINK_CHARS_MAX),
        fragments=event.fragments[:FRAGMENTS_MAX],
    )


def _clean_board(board: Board) -> Board:
    rows = tuple(map(_clean_board_row, board.rows))
    return msgspec.structs.replace(board, formula=line(board.formula, 40), rows=rows)


def _clean_board_row(row: BoardRow) -> BoardRow:
    return msgspec.structs.replace(
        row,
        name=line(row.name, NAME_CHARS_MAX),
        peer=line(row.peer, 64),
        owner=line(row.owner, 64),
        dispute=line(row.dispute),
        machines=tuple(map(_clean_board_row, row.machines)),
    )
