"""The board: an order that everybody agrees on, and recency without floating point."""

from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.board import (
    DAY_MS,
    HALF_LIFE_DAYS,
    POOL,
    RECENT_DAYS,
    WEIGHT_BITS,
    WEIGHTS,
    Basis,
    Tally,
    board_json,
    make_board,
    recent_score,
)
from dugnad.dht.ids import PeerId, name_of, peer_text

BASIS = Basis(as_of_ms=100 * DAY_MS, receipts=9, refused=1, versions=(7,), settled=(3,))


def test_weights_are_the_seventh_roots_of_powers_of_two_rounded_down() -> None:
    for days, weight in enumerate(WEIGHTS):
        power = 2 ** (HALF_LIFE_DAYS * WEIGHT_BITS - days)
        assert weight**HALF_LIFE_DAYS <= power < (weight + 1) ** HALF_LIFE_DAYS


def test_a_token_of_a_week_ago_counts_half_and_one_of_eleven_weeks_ago_nothing() -> None:
    assert recent_score({100: 1000}, BASIS.as_of_ms) == 1000
    assert recent_score({93: 1000}, BASIS.as_of_ms) == 500
    assert recent_score({100 - RECENT_DAYS - 1: 10**9}, BASIS.as_of_ms) == 0


@given(st.dictionaries(st.integers(0, 100), st.integers(1, 10**12), max_size=20))
def test_recent_never_exceeds_tokens_and_only_falls_with_time(days: dict[int, int]) -> None:
    scores = [recent_score(days, (100 + later) * DAY_MS) for later in range(0, 90, 9)]
    assert scores[0] <= sum(days.values())
    assert scores == sorted(scores, reverse=True)


def test_rows_are_ordered_by_recent_then_tokens_then_key() -> None:
    peers = [PeerId(bytes([n]) * 32) for n in range(1, 5)]
    totals = {
        peers[3]: Tally(tokens=50, days={100: 50}),
        peers[2]: Tally(tokens=900, days={90: 50}),
        peers[1]: Tally(tokens=60, days={100: 50}),
        peers[0]: Tally(tokens=50, days={100: 50}),
    }
    board = make_board(totals, BASIS)
    assert [row.peer for row in board.rows] == [peer_text(peers[n]) for n in (1, 0, 3, 2)]
    assert [row.rank for row in board.rows] == [1, 2, 3, 4]
    assert sum(row.share for row in board.rows) == 1.0
    assert board.rows[0].name == name_of(peers[1])
    backwards = dict(reversed(totals.items()))
    assert board_json(make_board(backwards, BASIS)) == board_json(board)


def test_the_pool_of_peers_beyond_the_bound_is_named_and_nothing_is_divided_by_zero() -> None:
    board = make_board({POOL: Tally(provisional=5)}, BASIS)
    assert (board.rows[0].name, board.rows[0].share) == ("everyone else", 0.0)
