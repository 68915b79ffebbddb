"""The pages: well formed, complete without a script, harmless whatever peers call themselves."""

import re
from collections.abc import Callable

import msgspec
import pytest

from dugnad.averaging.board import Basis, Claim, Owner, Tally, make_board
from dugnad.dashboard import events as ev
from dugnad.dashboard.boardpage import (
    board_query,
    leaderboard_csv,
    leaderboard_json,
    leaderboard_page,
)
from dugnad.dashboard.contributor import Receipt, contributor_page, known_peer
from dugnad.dashboard.figures import Choice
from dugnad.dashboard.frontpage import eta, events_page, front_page
from dugnad.dashboard.layout import View
from dugnad.dashboard.peerspage import COLUMNS, chosen_peers, peers_page, peers_query
from dugnad.dashboard.startpage import start_page
from dugnad.dashboard.state import State, apply

from .run_world import (  # noqa: TID252  the world is no installed package
    DAY_MS,
    HOSTILE,
    MINUTE_MS,
    NOW_MS,
    board,
    checked,
    described,
    folded,
    ids,
    keys,
    row,
    story,
    view,
)

A = ids(1)[0]
RECEIPT = Receipt(
    at_ms=NOW_MS,
    fragment=1,
    version=4,
    seq=9,
    tokens=1200,
    credited=1100,
    status="settled",
    home=A,
    witness=ids(2)[1],
    commit="ab" * 32,
)
PAGES: dict[str, Callable[[View], str]] = {
    "front": lambda v: front_page(v, Choice()),
    "front-log": lambda v: front_page(v, Choice("time", True)),
    "events": events_page,
    "peers": lambda v: peers_page(v, peers_query({})),
    "board": lambda v: leaderboard_page(v, board_query({}), ""),
    "board-me": lambda v: leaderboard_page(v, board_query({"period": "week"}), A),
    "peer": lambda v: contributor_page(v, A, [RECEIPT]),
    "start": lambda v: start_page({"one": v}),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_well_formed_with_a_run_and_without(name: str) -> None:
    for state in (folded(*story()), State()):
        page = checked(PAGES[name](View(state, NOW_MS)))
        assert page.of("html")[0]["lang"] == "en"
        assert len(page.of("h1")) == 1
        assert page.of("title")


@pytest.mark.parametrize("name", PAGES)
def test_pages_load_nothing_from_elsewhere_and_have_nothing_inline(name: str) -> None:
    page = checked(PAGES[name](view(base="/run/one")))
    for tag, attributes in page.elements:
        assert "style" not in attributes
        assert not [key for key in attributes if key.startswith("on")]
        assert tag != "style"
        for key in ("href", "src", "action", "data-src"):
            target = attributes.get(key, "/")
            assert target.startswith(("/", "#", "data:,")), (tag, target)
            assert not target.startswith("//")
    assert all(one.get("src") for one in page.of("script"))


@pytest.mark.parametrize("words", HOSTILE)
@pytest.mark.parametrize("name", PAGES)
def test_hostile_names_stay_text(name: str, words: str) -> None:
    hostile = story((words, words, words))
    hostile.append(
        described(
            name=words,
            purpose=words,
            licence=words,
            organiser=words,
            model=((words, words),),
            data=((words, words),),
            link=words,
        )
    )
    plain = checked(PAGES[name](view()))
    page = checked(PAGES[name](view(*hostile)))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"div"}
    assert not [c for c in page.text if c in "\u202a\u202b\u202d\u202e\u2066\u200b\x00\x1b"]
    for _, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")]
        assert not attributes.get("href", "").startswith(("javascript:", "http"))


@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_keys_and_receipts_stay_text(words: str) -> None:
    receipt = Receipt(
        at_ms=-1,
        fragment=0,
        version=0,
        seq=0,
        tokens=0,
        credited=0,
        status=words,
        reason=words,
        home=words,
        witness=words,
        commit=words,
    )
    page = checked(contributor_page(view(), words, [receipt]))
    assert not page.of("img")
    assert len(page.of("script")) == 1


def test_the_front_page_says_what_why_how_and_how_far() -> None:
    page = checked(front_page(view(), Choice()))
    for words in (
        "Fjord stories",
        "To see it work.",
        "dugnad join 'dugnad:",
        "30.0 % of 2.00 M",
        "Held-out loss",
        "2.150",
        "in 30 s",
        "fragment 1, 60 merges so far",
        "4.0 times less than float32",
        "2 work units of kind-otter moved to kind-otter",
        "Once kind-otter",
        "Apache-2.0",
    ):
        assert words in page.text, words
    assert {one["data-chart"] for one in page.of("figure")} == {
        "loss",
        "throughput",
        "peers",
        "contributions",
    }


def test_a_link_is_quoted_for_the_shell() -> None:
    page = checked(front_page(view(described(link="dugnad:x?a=$(rm -rf ~)&b='; ls")), Choice()))
    assert "dugnad join 'dugnad:x?a=$(rm -rf ~)&b='\\''; ls'" in page.text


def test_the_time_to_go_is_words_and_never_negative() -> None:
    known = view()
    assert eta(known, 100.0, 2_000_000) == "about 3\u00a0h\u00a053\u00a0min to go"
    assert eta(known, None, 2_000_000) == "time to go unknown"
    assert eta(known, 0.0, 2_000_000) == "time to go unknown"
    assert eta(known, 100.0, 5) == "target reached"


def test_a_page_that_heard_nothing_for_a_while_says_so() -> None:
    state = folded(*story())
    fresh = checked(front_page(View(state, NOW_MS + 1000), Choice()))
    late = checked(front_page(View(state, NOW_MS + 5 * MINUTE_MS), Choice()))
    assert "hidden" in next(one for one in fresh.of("p") if one.get("id") == "stale")
    assert "Nothing new since 5 min ago" in late.text


def test_an_ended_run_says_why_and_expects_nothing() -> None:
    ended = ev.RunEnded(at_ms=NOW_MS, reason="the token budget is reached")
    page = checked(front_page(View(apply(folded(*story()), ended), NOW_MS), Choice()))
    assert "the token budget is reached" in page.text
    assert "ended" in page.text


@pytest.mark.parametrize("column", COLUMNS)
def test_peers_sort_by_each_column_both_ways(column: str) -> None:
    rows = [row(peer, f"n{n}", tokens_per_s=float(n % 3)) for n, peer in enumerate(ids(9))]
    key = COLUMNS[column][2]
    for direction, falling in (("up", False), ("down", True)):
        found = chosen_peers(rows, peers_query({"sort": column, "dir": direction}))
        values = [key(one) for one in found]
        assert values == sorted(values, reverse=falling)


def test_peers_are_found_by_words_and_by_whether_they_are_here() -> None:
    rows = [row(A, "kind-otter"), row(ids(2)[1], "calm-birch", gone_ms=5, state="left")]
    assert [r.name for r in chosen_peers(rows, peers_query({"q": "OTTER direct"}))] == [
        "kind-otter"
    ]
    assert [r.name for r in chosen_peers(rows, peers_query({"show": "gone"}))] == ["calm-birch"]
    page = checked(peers_page(view(), peers_query({"q": "nobody"})))
    assert "No peer matches." in page.text


def test_equal_names_are_told_apart_by_the_end_of_the_key() -> None:
    page = checked(peers_page(view(), peers_query({})))
    for peer in ids(3):
        assert peer[-6:] in page.text


def test_many_peers_are_paged() -> None:
    rows = tuple(row(peer, f"peer {n}") for n, peer in enumerate(ids(120)))
    many = view(ev.PeerChanged(at_ms=NOW_MS, rows=rows))
    first = checked(peers_page(many, peers_query({})))
    last = checked(peers_page(many, peers_query({"page": "3"})))
    assert (len(first.of("tr")), len(last.of("tr"))) == (51, 21)
    assert "page 3 of 3, 120 rows" in last.text


def test_the_board_says_what_it_rests_on_and_leaves_verified_empty() -> None:
    page = checked(leaderboard_page(view(), board_query({}), ""))
    assert "Computed from 9 receipts, as of 2026-11-30 03:00:00 UTC (credit/1)." in page.text
    assert "Verified is empty" in page.text
    assert "54.5 %" in page.text


def test_numbers_of_the_board_open_into_the_receipts_behind_them() -> None:
    known = view()
    leader = ids(1)[0]
    board = checked(leaderboard_page(known, board_query({}), ""))
    behind = [one for one in board.of("a") if one["href"] == f"/peer/{leader}#receipts"]
    assert len(behind) == 4
    opened = checked(contributor_page(known, leader, ()))
    assert [one["id"] for one in opened.of("section") if "id" in one] == ["receipts"]


def test_find_me_shows_the_rows_around() -> None:
    many = view(ev.BoardComputed(at_ms=NOW_MS, board=board(keys(200))))
    wanted = many.state.board.rows[100].peer if many.state.board is not None else ""
    page = checked(leaderboard_page(many, board_query({}), wanted[-9:]))
    assert len(page.of("tr")) == 12
    assert [one for one in page.of("tr") if one.get("class") == "me"]
    lost = checked(leaderboard_page(many, board_query({}), "zzz"))
    assert "Nobody on the board has that name or key" in lost.text


def test_a_period_counts_the_merges_in_it() -> None:
    state = folded(*story())
    later = View(state, NOW_MS + 3 * DAY_MS)
    day = leaderboard_page(later, board_query({"period": "day"}), "")
    week = leaderboard_page(later, board_query({"period": "week"}), "")
    assert 'data-v="200000"' not in day
    assert 'data-v="200000"' in week


def test_a_spreadsheet_runs_nothing_of_the_csv() -> None:
    rows = board(keys(2))
    bad = msgspec.structs.replace(rows.rows[0], name="=HYPERLINK(1)")
    evil = msgspec.structs.replace(rows, rows=(bad, *rows.rows[1:]))
    text = leaderboard_csv(view(ev.BoardComputed(at_ms=NOW_MS, board=evil)))
    assert ",'=HYPERLINK(1)," in text
    assert text.splitlines()[0].startswith("rank,name,peer,recent,tokens,share")


def test_a_contributor_has_credit_machine_history_and_receipts() -> None:
    known = view()
    page = checked(contributor_page(known, A, [RECEIPT]))
    for words in (
        "Credit",
        "Machine, as it describes itself",
        "History",
        "1.20 k",
        "settled",
        "no audit exists yet",
        "signed by its maker",
    ):
        assert words in page.text, words
    assert re.search(r'class="band"', contributor_page(known, A, []))  # its stretches of the loss
    assert known_peer(known, A)
    assert not known_peer(known, "nobody")
    assert "Nothing is known here" in checked(contributor_page(known, "nobody", [])).text


def test_each_figure_has_a_caption_a_table_and_a_place_to_read_aloud() -> None:
    page = checked(front_page(view(), Choice()))
    figures = len(page.of("figure"))
    assert (
        len(page.of("figcaption")) == len(page.of("details")) == len(page.of("output")) == figures
    )
    assert all(one["aria-live"] == "polite" for one in page.of("output"))


def owned() -> View:
    """Three peers, two of which are one owner's."""
    first, second, _ = keys(3)
    tallies = {peer: Tally(tokens=100 * n, units=n) for n, peer in enumerate(keys(3), start=1)}
    owners = {first: Owner(keys(9)[8], HOSTILE[0]), second: Owner(keys(9)[8], HOSTILE[0])}
    made = make_board(tallies, Basis(NOW_MS, 9, 0, (5, 4), (4, 3)), owners)
    return view(ev.BoardComputed(at_ms=NOW_MS, board=made))


def test_an_owner_is_one_row_whose_page_lists_its_machines() -> None:
    known, owner = owned(), ids(9)[8]
    board_page = checked(leaderboard_page(known, board_query({}), ""))
    assert "2 machines" in board_page.text
    page = checked(contributor_page(known, owner, []))
    assert "Machines of this owner" in page.text
    assert "Receipts and history are on each machine" in page.text
    assert [a for a in page.of("a") if ids(3)[1] in a.get("href", "")]
    machine = checked(contributor_page(known, ids(3)[1], [RECEIPT]))
    assert "Machine of" in machine.text
    assert [a for a in machine.of("a") if owner in a.get("href", "")]
    assert known_peer(known, ids(3)[0])
    found = checked(leaderboard_page(known, board_query({}), ids(3)[1]))
    assert "Around the row that was looked for" in found.text
    rows = leaderboard_csv(known).splitlines()
    assert rows[0].endswith(",last,disputed,dispute,machines")
    mine = next(one for one in rows if owner in one)
    assert mine.endswith(f",{ids(3)[1]} {ids(3)[0]}")


def test_a_disputed_claim_is_shown_with_its_reason_everywhere() -> None:
    first, second = keys(2)
    tallies = {peer: Tally(tokens=100) for peer in (first, second)}
    claims = {
        first: Claim(900.0, 90.0, 5400, f"its receipts claim more {HOSTILE[0]}"),
        second: Claim(50.0, None),
    }
    made = make_board(tallies, Basis(NOW_MS, 9, 0, (5, 4), (4, 3)), None, claims)
    known = view(ev.BoardComputed(at_ms=NOW_MS, board=made))
    whole = checked(leaderboard_page(known, board_query({}), ""))
    assert whole.text.count("disputed: 5.40 k tokens") == 1
    page = checked(contributor_page(known, ids(2)[0], []))
    for words in ("5.40 k tokens: its receipts claim more", "900 tokens/s", "90 tokens/s"):
        assert words in page.text
    other = checked(contributor_page(known, ids(2)[1], []))
    assert "not timed by enough members yet" in other.text
    assert "Disputed" not in other.text
    assert "its receipts claim more" in leaderboard_csv(known)
    assert b'"disputed":5400' in leaderboard_json(known)
