"""A data folder, and a daemon that exists in memory only, for the tests of the front door."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dugnad.averaging.board import Board, BoardRow
from dugnad.peer.leaderboard import board_view
from dugnad.peer.lifecycle import Input
from dugnad.peer.paths import Home
from dugnad.peer.views import EventRow, PeerRow, Status


def make_status(**changes: object) -> Status:
    """A status with every field set; `changes` replace some."""
    fields: dict[str, object] = {
        "run": "a" * 52,
        "name": "State of the Union",
        "peer": "12D3KooWexample",
        "state": "training",
        "reason": "",
        "pid": 4242,
        "uptime_s": 61.5,
        "started_at_ms": 1,
        "version": "0.1.0",
        "step": 12,
        "tokens": 12_288,
        "tokens_per_s": 2048.5,
        "swarm_tokens": 50_000,
        "swarm_tokens_per_s": 8000.0,
        "peers_live": 4,
        "versions": [3, 2],
        "heads": ["aa", "bb"],
        "anchor_loss": 2.5,
        "train_loss": None,
        "merges": 5,
        "interval_s": 1.5,
        "longest_gap_s": 2.25,
        "units": {"open": 3, "settled": 1},
        "addresses": ["/ip4/127.0.0.1/tcp/1"],
        "link": "dugnad:x",
        "residual_norm_share": 0.1,
        "bytes_sent": 1_000_000,
        "bytes_received": 2_000_000,
        "codec": "int8",
        "last_takeover_s": None,
        "join_to_listed_s": 4.0,
    }
    return Status(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types


def make_board(tokens: int) -> Board:
    """A board with one peer on it."""
    row = BoardRow(
        rank=1,
        peer="12D3KooWexample",
        name="one",
        tokens=tokens,
        share=1.0,
        provisional=0,
        unwitnessed=0,
        twice=0,
        contributions=1,
        units=1,
        recent=tokens,
        first_ms=1,
        last_ms=1,
    )
    return Board(
        formula="settled/1",
        as_of_ms=1,
        receipts=1,
        refused=0,
        versions=(1,),
        settled=(1,),
        tokens=tokens,
        provisional=0,
        twice=0,
        units_covered=1,
        rows=(row,),
    )


class MemoryView:
    """A `DaemonView` that answers from what the test put into it."""

    def __init__(self) -> None:
        self.state = "training"
        self.name = "ærlig"
        self.left: list[bool] = []
        self.steered: list[tuple[Input, int]] = []

    def status(self) -> Status:
        return make_status(state=self.state)

    def peers(self) -> list[PeerRow]:
        row = PeerRow(
            peer="12D3KooWexample",
            name=self.name,
            state="live",
            speed_class=22,
            tokens_per_s=2048.0,
            link="direct",
            since_s=10.0,
            last_seen_s=0.25,
            listed_tokens=1024,
            version="0.1.0",
            addresses=[],
        )
        return [row]

    def leaderboard(self) -> Mapping[str, object]:
        return board_view(make_board(tokens=4096))

    def units(self) -> Mapping[str, object]:
        counts = ("epoch", "claimed", "trained", "listed", "settled", "twice", "lost", "mine")
        row = {"unit": "0/7", "state": "open", "holder": "this peer", "overdue_s": -2.5}
        return {
            **dict.fromkeys(counts, 1),
            "open": 3,
            "epoch_sequences": 400,
            "epoch_progress": 0.25,
            "rows": [row],
        }

    def evaluation(self) -> Mapping[str, object]:
        point = {"version": 8, "tokens": 9, "loss": 2.5, "units": 3, "of": 4, "evaluators": 1}
        earned = {"name": "one", "peer": "12D3", "evaluated_tokens": 512, "pending": 7}
        made = {"name": "two", "peer": "12D4", "prepared_tokens": 2048, "pending": 7}
        return {"curve": [point], "earned": [earned], "prepared": [made]}

    def events(self, since: int) -> list[EventRow]:
        row = EventRow(n=7, at_ms=1, kind="joined", text="one joined", data={"peer": "one"})
        return [row] if since < row.n else []

    def request_leave(self, drain: bool) -> None:
        self.left.append(drain)

    def owner_changed(self) -> str:
        return ""

    def steer(self, given: Input, until_ms: int = 0) -> str:
        self.steered.append((given, until_ms))
        return f"{given} it is"


@pytest.fixture
def view() -> MemoryView:
    """A daemon in memory."""
    return MemoryView()


@pytest.fixture
def status_of() -> Callable[..., Status]:
    """Makes a status; keyword arguments replace its fields."""
    return make_status


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty data folder that exists."""
    place = Home(tmp_path / "home")
    place.create()
    return place
