"""What a daemon shows of itself: the values that the control API, the command line and the pages
read.

Every number carries its unit in its name. An absent measurement is None, never an invented zero.
"""

import unicodedata
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from dugnad.dht.plaintext import HOSTILE_CATEGORIES
from dugnad.peer.lifecycle import Input

NAME_CHARS_MAX: Final = 32
"""Of a peer's label, as shown: volunteers.md 2.4."""
EVENTS_PER_REPLY_MAX: Final = 500
"""Events in one answer; whoever wants more asks again from the last number."""

# Control, format (bidi overrides, zero-width), surrogate, private use, unassigned, line and
# paragraph separators.


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One daemon at one moment. `state` is one word, `reason` says in one line why it is not
    training.
    """

    run: str
    name: str
    peer: str
    state: str
    reason: str
    pid: int
    uptime_s: float
    started_at_ms: int
    version: str
    step: int
    tokens: int
    tokens_per_s: float
    swarm_tokens: int
    swarm_tokens_per_s: float
    peers_live: int
    versions: list[int]
    heads: list[str]
    """Digest of each fragment's head, hexadecimal."""
    anchor_loss: float | None
    """Held-out loss of the agreed parameters, nats a token."""
    train_loss: float | None
    merges: int
    interval_s: float
    """Usual time between two merges of the swarm."""
    longest_gap_s: float
    units: dict[str, int]
    """Units by state and other counts: `dugnad.peer.unitsview.unit_counts`."""
    addresses: list[str]
    link: str
    residual_norm_share: float
    """Norm of what is not yet handed in, as a share of the last hand-in's norm."""
    bytes_sent: int
    bytes_received: int
    codec: str
    """Of the newest hand-in; before the first, the run's own."""
    last_takeover_s: float | None
    """From the moment a peer's loss was seen until its units were claimed by others."""
    join_to_listed_s: float | None
    """From this daemon's start to its first listed contribution."""
    clock_offset_s: float = 0.0
    """What the swarm's clocks are ahead of this machine's, as far as peers agree."""
    reachable: str = "unknown"
    """How others reach this peer: direct, relayed, outbound, or unknown."""
    evaluated_tokens: int = 0
    """Held-out tokens that this daemon scored since it started."""
    prepared_tokens: int = 0
    """Tokens that it prepared for others."""
    units_before_text: int | None = None
    """Units that it fetched by their hash while it has not the whole text; None once it has."""
    reach: str = ""
    """What the peers that tried found, in a line."""
    quota_used: int = 0
    """Bytes up and down in the last 30 days."""
    dashboard: str = ""
    """Where this daemon serves the public page; '' when it serves none."""
    codec_reason: str = ""
    """Why that codec; '' before the first hand-in."""
    bits_per_param: float = 0.0
    """Of the newest hand-in."""
    bytes_saved: int = 0
    """What all hand-ins would have been longer as float32."""
    up_bytes_per_s: float = 0.0
    """What this machine's line was seen to give, up and down; 0: not measured yet."""
    down_bytes_per_s: float = 0.0
    control_p99_s: float | None = None
    """Of the newest round trips of heartbeats the 99th percentile."""
    heartbeats_lost: int = 0
    parameters: int = 0
    """Of the model."""
    kernels: str = ""
    """What computes the exchange's numbers, in words; '' while that is not known."""
    hand_ins: int = 0
    """Contributions of this peer that a home took over the network."""
    learner_s: dict[str, float] = {}
    """What the learner's time went into, seconds: training `steps`; between them it `served` the
    exchange, did what else it was `asked`, `rested` for its owner's share, `starved` for work."""
    slow_followers: list[str] = []
    """Members that cannot fetch this peer's last commit before the next one is due."""


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of the swarm as this daemon sees it. `link` is direct, relayed or unknown."""

    peer: str
    name: str
    state: str
    speed_class: int
    tokens_per_s: float
    link: str
    since_s: float
    last_seen_s: float
    listed_tokens: int
    version: str
    addresses: list[str]
    reason: str = ""
    """Why it is not reached, or not served; '' for live peers."""
    roles: list[str] = []
    """What its advert says that it does."""
    codec: str = ""
    """Of the newest hand-in to it; '' before the first. The next two are of hand-ins, too."""
    bits_per_param: float = 0.0
    bytes_saved: int = 0
    rate_bytes_per_s: float = 0.0
    """What the link to it was seen to carry; 0: not measured yet."""
    rtt_s: float | None = None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, in plain words. `n` rises by one with each event of this daemon."""

    n: int
    at_ms: int
    kind: str
    text: str
    data: dict[str, str | int | float]


class DaemonView(Protocol):
    """What the control API asks of a daemon. All of it answers at once, from memory."""

    def status(self) -> Status:
        """How this daemon is."""
        ...

    def peers(self) -> list[PeerRow]:
        """The peers of the swarm, this one included."""
        ...

    def leaderboard(self) -> Mapping[str, object]:
        """The board, as `dugnad.peer.leaderboard.board_view` makes it."""
        ...

    def units(self) -> Mapping[str, object]:
        """The work units: counts by state, and `rows` of those that are open; everything can be
        JSON.
        """
        ...

    def evaluation(self) -> Mapping[str, object]:
        """The validation `curve`, what evaluators `earned`, and what preparers `prepared`;
        everything can be JSON."""
        ...

    def events(self, since: int) -> list[EventRow]:
        """Events with `n` > `since`, oldest first; those that were forgotten are left out."""
        ...

    def request_leave(self, drain: bool) -> None:
        """Starts leaving and returns; with `drain`, what was learned is handed in first."""
        ...

    def order(self, data: bytes) -> str:
        """Takes signed orders of the organiser; why not, or ''."""
        ...

    def owner_changed(self) -> str:
        """Looks again at whose machine this is; what is wrong with it, or ''."""
        ...

    def steer(self, given: Input, until_ms: int = 0) -> str:
        """Takes what its owner says (PAUSE, RESUME, SNOOZE until `until_ms`, FINISH); the
        answer."""
        ...


def printable(text: str, limit: int = NAME_CHARS_MAX) -> str:
    """`text` without control, bidi and other invisible characters, on one line, at most `limit`
    long.

    For everything that a stranger wrote and a person reads.
    """
    kept = "".join(
        c for c in text[: 4 * limit] if unicodedata.category(c) not in HOSTILE_CATEGORIES
    )
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"
