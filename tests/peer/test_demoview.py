"""What a person sees while the demo runs."""

import io
from collections.abc import Callable

from rich.console import Console

from dugnad.peer.demoview import DemoView, Scene, headline, plain_line, scene, table
from dugnad.peer.views import EventRow, PeerRow, Status


def row(peer: str, listed: int) -> PeerRow:
    """A peer as another sees it."""
    return PeerRow(
        peer=peer,
        name="",
        state="live",
        speed_class=1,
        tokens_per_s=1.0,
        link="direct",
        since_s=1.0,
        last_seen_s=0.0,
        listed_tokens=listed,
        version="1",
        addresses=[],
    )


def event(n: int, text: str, kind: str = "joined", at_ms: int = 1000) -> EventRow:
    """An event of a peer."""
    return EventRow(n=n, at_ms=at_ms, kind=kind, text=text, data={})


def swarm(status_of: Callable[..., Status], elapsed_s: float = 10.0) -> Scene:
    """Two peers that train, one that was killed."""
    first = status_of(peer="p1", tokens_per_s=100.0, tokens=1000, merges=5, anchor_loss=None)
    second = status_of(peer="p2", tokens_per_s=50.0, tokens=500, merges=6, anchor_loss=2.5)
    told = [("one", "", first), ("two [b]", "", second), ("three", "killed", None)]
    return scene(elapsed_s, 90.0, told, [row("p1", 900), row("p9", 1)])


def test_a_scene_adds_up_what_the_peers_told(status_of: Callable[..., Status]) -> None:
    now = swarm(status_of)
    assert now.tokens_per_s == 150.0
    assert now.merges == 6
    assert now.loss == 2.5
    assert [line.listed for line in now.lines] == [900, None, None]
    assert [line.state for line in now.lines] == ["training", "training", "killed"]


def test_a_scene_without_answers_is_shown_too() -> None:
    now = scene(0.0, 90.0, [("peer 1", "starting", None)], [])
    assert "not measured yet" in headline(now)
    assert "peer 1: starting" in plain_line(now)


def test_the_table_shows_peers_and_events_and_reads_no_markup_in_names(
    status_of: Callable[..., Status],
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=110)
    console.print(table(swarm(status_of), ["3.0 s  [red]something[/red] happened"]))
    shown = stream.getvalue()
    assert "two [b]" in shown
    assert "[red]something[/red] happened" in shown
    assert "1,000" in shown
    assert "killed" in shown


def test_without_a_terminal_progress_comes_every_few_seconds(
    status_of: Callable[..., Status],
) -> None:
    stream = io.StringIO()
    view = DemoView(stream)
    view.open()
    for elapsed in (0.0, 0.5, 4.9, 5.0, 9.0, 10.0):
        view.show(swarm(status_of, elapsed))
    view.say("a thing happened")
    view.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("  0 of 90 s")
    assert lines[-1].endswith("a thing happened")


def test_what_two_peers_saw_is_told_once() -> None:
    stream = io.StringIO()
    view = DemoView(stream)
    view.tell("one", [event(1, "ann joined"), event(2, "version 3", kind="merge")])
    view.tell("two", [event(1, "ann joined", at_ms=3000)])
    view.tell("two", [event(2, "ann joined", at_ms=60_000)])
    told = stream.getvalue().splitlines()
    assert [line.split("s  ")[1] for line in told] == ["one: ann joined", "two: ann joined"]


def test_the_texts_of_events_are_printed_without_control_characters() -> None:
    stream = io.StringIO()
    DemoView(stream).tell("one", [event(1, "red \x1b[31m alert\u202e")])
    assert "\x1b" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()
