"""What a person sees while the demo runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from dugnad.peer.views import EventRow, PeerRow, Status, printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

PLAIN_EVERY_S: Final = 5.0
"""Between two lines of progress where there is no terminal."""
EVENTS_SHOWN: Final = 10
EVENT_CHARS_MAX: Final = 200
SAME_EVENT_S: Final = 10.0
"""Peers see the same things: what one has told is not told again by another for so long."""
REMEMBERED_MAX: Final = 512
QUIET_KINDS: Final = frozenset({"merge", "merged", "commit", "unit", "claim", "progress"})
"""Events of every second; the table's numbers show them."""


@dataclass(frozen=True, slots=True)
class PeerLine:
    """One row of the table. Absent numbers are None."""

    name: str
    state: str
    tokens_per_s: float | None = None
    tokens: int | None = None
    listed: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """The swarm at one moment."""

    elapsed_s: float
    seconds: float
    lines: tuple[PeerLine, ...]
    tokens_per_s: float
    tokens: int
    merges: int
    versions: tuple[int, ...]
    loss: float | None


def scene(
    elapsed_s: float,
    seconds: float,
    told: Sequence[tuple[str, str, Status | None]],
    peer_rows: Sequence[PeerRow],
) -> Scene:
    """Put together what the peers told: (name, state where there is no status, status), and the
    rows of any of them for the listed tokens.
    """
    listed = {row.peer: row.listed_tokens for row in peer_rows}
    lines = tuple(
        PeerLine(name, state)
        if status is None
        else PeerLine(
            name, status.state, status.tokens_per_s, status.tokens, listed.get(status.peer)
        )
        for name, state, status in told
    )
    known = [status for _, _, status in told if status is not None]
    furthest = max(known, key=lambda status: status.merges, default=None)
    losses = [status.anchor_loss for status in known if status.anchor_loss is not None]
    return Scene(
        elapsed_s=elapsed_s,
        seconds=seconds,
        lines=lines,
        tokens_per_s=sum(status.tokens_per_s for status in known),
        tokens=furthest.swarm_tokens if furthest else 0,
        merges=furthest.merges if furthest else 0,
        versions=tuple(furthest.versions) if furthest else (),
        loss=min(losses, default=None),
    )


def headline(now: Scene) -> str:
    """The swarm in one line."""
    loss = "not measured yet" if now.loss is None else f"{now.loss:.3f}"
    versions = " ".join(str(version) for version in now.versions) or "-"
    return (
        f"{now.elapsed_s:3.0f} of {now.seconds:.0f} s  loss {loss}  {now.tokens_per_s:,.0f} "
        f"tokens/s  {now.tokens:,} tokens  {now.merges} merges  versions {versions}"
    )


def plain_line(now: Scene) -> str:
    """The swarm and its peers in one line, for a log."""
    peers = ", ".join(
        f"{line.name}: {line.state}"
        + (f" {line.tokens_per_s:,.0f}/s" if line.tokens_per_s is not None else "")
        for line in now.lines
    )
    return f"{headline(now)}  [{peers}]"


def table(now: Scene, events: Sequence[str]) -> Table:
    """The swarm, its peers and the latest events, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=headline(now), title_justify="left", caption_justify="left")
    grid.add_column("peer")
    grid.add_column("state")
    for column in ("tokens/s", "tokens", "listed"):
        grid.add_column(column, justify="right")
    for line in now.lines:
        numbers = (line.tokens_per_s, line.tokens, line.listed)
        cells = ["-" if number is None else f"{number:,.0f}" for number in numbers]
        grid.add_row(*(Text(cell) for cell in [printable(line.name), line.state, *cells]))
    grid.caption = Text("\n".join(events))
    return grid


class DemoView:
    """Shows scenes and events on `stream` between `open` and `close`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._told: OrderedDict[str, float] = OrderedDict()
        self._begun = time.monotonic()
        self._last_plain = float("-inf")
        self._now: Scene | None = None

    def open(self) -> None:
        """Begin with the table, where the stream is a terminal."""
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()

    def show(self, now: Scene) -> None:
        """The swarm as it is now."""
        self._now = now
        if self._live is not None:
            self._live.update(table(now, self._events), refresh=True)
        elif now.elapsed_s - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = now.elapsed_s
            self._write(plain_line(now))

    def say(self, text: str) -> None:
        """Something that happened."""
        line = f"{time.monotonic() - self._begun:5.1f} s  {printable(text, EVENT_CHARS_MAX)}"
        self._events.append(line)
        if self._live is None:
            self._write(line)
        elif self._now is not None:
            self._live.update(table(self._now, self._events), refresh=True)
        else:
            self._live.console.print(line, highlight=False, markup=False)

    def tell(self, name: str, events: Sequence[EventRow]) -> None:
        """What a peer says happened, unless another has just told it."""
        for event in events:
            if event.kind in QUIET_KINDS:
                continue
            told = self._told.get(event.text)
            if told is None or event.at_ms / 1000 - told > SAME_EVENT_S:
                self._told[event.text] = event.at_ms / 1000
                self.say(f"{name}: {event.text}")
            while len(self._told) > REMEMBERED_MAX:
                self._told.popitem(last=False)

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
