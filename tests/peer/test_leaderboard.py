"""The board as people read it."""

import io
import json

import pytest

from dugnad.averaging.board import Basis, Board, Tally, board_json, make_board
from dugnad.dht.ids import PeerId, name_of, peer_text
from dugnad.peer.leaderboard import (
    board_lines,
    board_text,
    board_view,
    print_board,
    read_board,
)

NOW_MS = 1_800_000_000_000
PEERS = [PeerId(bytes([n]) * 32) for n in range(1, 6)]


def board(peers: int = 3) -> Board:
    day = NOW_MS // 86_400_000
    totals = {
        peer: Tally(
            tokens=1_234_567 // n,
            provisional=500,
            unwitnessed=100,
            twice=7,
            contributions=3,
            units=2,
            first_ms=NOW_MS - 90_000,
            last_ms=NOW_MS - 65_000,
            days={day: 1_234_567 // n},
        )
        for n, peer in enumerate(PEERS[:peers], start=1)
    }
    return make_board(totals, Basis(NOW_MS, 9, 0, (5, 6), (1, 2)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_say_who_how_much_and_what_it_rests_on() -> None:
    lines = board_lines(board(), now_ms=NOW_MS, own=PEERS[1])
    assert lines[0].split()[:3] == ["#", "name", "key"]
    assert name_of(PEERS[0]) in lines[1]
    assert peer_text(PEERS[0])[-6:] in lines[1]
    assert "1.23 M" in lines[1]
    assert "1 min ago" in lines[1]
    assert "(you)" in lines[2]
    assert lines[-1] == (
        "Computed from 9 receipts in 11 merges, settled as of 2027-01-15 08:00:00 UTC (credit/1)."
    )
    assert any("wait for another peer" in line for line in lines)


def test_a_long_board_is_cut_but_shows_the_reader() -> None:
    lines = board_lines(board(5), now_ms=NOW_MS, own=PEERS[4], rows_max=2)
    assert sum("min ago" in line for line in lines) == 3
    assert any("(you)" in line for line in lines)
    assert any("3 more" in line for line in lines)


def test_an_empty_board_says_that_nothing_is_settled() -> None:
    empty = make_board({}, Basis(0, 0, 0, (0,), (0,)))
    assert "nothing is settled yet" in board_lines(empty, now_ms=NOW_MS)[-1]


def test_a_pipe_gets_plain_lines_and_a_terminal_a_table() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    print_board(board(), pipe, now_ms=NOW_MS)
    print_board(board(), terminal, now_ms=NOW_MS, own=PEERS[0])
    assert pipe.getvalue().splitlines() == board_lines(board(), now_ms=NOW_MS)
    assert "Who trained this model" in terminal.getvalue()
    assert "Computed from 9 receipts" in terminal.getvalue()


@pytest.mark.parametrize("peers", [0, 3])
def test_json_holds_the_whole_board(peers: int) -> None:
    one = board(peers)
    assert json.loads(board_text(one)) == json.loads(json.dumps(board_view(one)))
    assert board_json(read_board(json.loads(board_text(one)))) == board_json(one)
