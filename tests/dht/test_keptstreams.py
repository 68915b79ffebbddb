"""Streams between two transfers: which goes out again, and what ends those that wait."""

from dataclasses import dataclass

from dugnad.dht.ids import PeerId
from dugnad.dht.keptstreams import KEPT_MAX, KEPT_PER_PEER_MAX, KEPT_S, KeptStreams

ANNA, BERIT = PeerId(b"a" * 32), PeerId(b"b" * 32)
PULL, PUSH = "/pull", "/push"


@dataclass(eq=False)
class Line:
    """A stream that is quiet until somebody says or ends something."""

    peer: PeerId
    quiet: bool = True
    ended: bool = False

    def is_quiet(self) -> bool:
        return self.quiet and not self.ended

    def abort(self) -> None:
        self.ended = True


class Table(KeptStreams):
    """With a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now)


def test_the_stream_that_was_given_back_last_goes_out_first_and_only_once() -> None:
    table, first, second = Table(), Line(ANNA), Line(ANNA)
    table.keep(PULL, first)
    table.keep(PULL, second)
    assert [table.take(ANNA, PULL) for _ in range(3)] == [second, first, None]
    assert not first.ended


def test_a_stream_goes_to_nobody_else_and_carries_no_other_protocol() -> None:
    table, line = Table(), Line(ANNA)
    table.keep(PULL, line)
    assert table.take(BERIT, PULL) is None
    assert table.take(ANNA, PUSH) is None
    assert table.take(ANNA, PULL) is line


def test_what_has_waited_for_too_long_ends() -> None:
    table, old, young = Table(), Line(ANNA), Line(ANNA)
    table.keep(PULL, old)
    table.now += KEPT_S / 2
    table.keep(PULL, young)
    assert table.end_old() == KEPT_S / 2
    table.now += KEPT_S / 2
    assert table.take(ANNA, PULL) is young
    assert old.ended
    assert table.end_old() is None


def test_a_stream_that_ended_or_said_something_meanwhile_is_passed_over() -> None:
    table, good, loud, dead = Table(), Line(ANNA), Line(ANNA), Line(ANNA)
    for line in (good, loud, dead):
        table.keep(PULL, line)
    loud.quiet, dead.ended = False, True
    assert table.take(ANNA, PULL) is good
    assert loud.ended


def test_a_stream_on_which_something_lies_unread_is_not_kept() -> None:
    table, line = Table(), Line(ANNA, quiet=False)
    table.keep(PULL, line)
    assert line.ended
    assert not len(table)


def test_one_peer_takes_so_many_places_and_no_more() -> None:
    table = Table()
    lines = [Line(ANNA) for _ in range(KEPT_PER_PEER_MAX + 1)]
    other = Line(ANNA)
    table.keep(PUSH, other)
    for line in lines:
        table.keep(PULL, line)
    assert [line.ended for line in lines] == [True] + [False] * KEPT_PER_PEER_MAX
    assert not other.ended


def test_the_oldest_ends_where_there_are_too_many() -> None:
    table = Table()
    lines = [Line(PeerId(bytes([i]) * 32)) for i in range(KEPT_MAX + 1)]
    for line in lines:
        table.keep(PULL, line)
    assert len(table) == KEPT_MAX
    assert [line.ended for line in lines] == [True] + [False] * KEPT_MAX
    table.end_all()
    assert all(line.ended for line in lines)
