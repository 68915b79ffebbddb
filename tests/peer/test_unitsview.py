"""What people are told of work units."""

import hashlib

from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.credit import CreditFold
from dugnad.dht.ids import PeerId, RunId, name_of, peer_text
from dugnad.peer.render import units_text
from dugnad.peer.unitevents import OpenUnit
from dugnad.peer.unitsview import open_row, unit_counts

from .page_world import STATUS  # noqa: TID252  the world is no installed package

ME, OTHER = (PeerId(hashlib.sha256(word).digest()) for word in (b"me", b"other"))
RULES = CreditRules(
    RunId(bytes(32)), fragments=2, sequence_tokens=10, unit_sequences=4, epoch_sequences=38
)


def unit(**changes: object) -> OpenUnit:
    fields: dict[str, object] = {
        "epoch": 1,
        "index": 7,
        "sequences": 4,
        "listed": 0,
        "in_hand": 0,
        "trained": 0,
        "holder": OTHER,
        "claimed": False,
        "tries": 0,
        "overdue_s": -1.26,
    }
    return OpenUnit(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types


def test_the_states_come_first_and_in_the_order_of_a_unit_s_life() -> None:
    counts = unit_counts(STATUS, CreditFold(RULES))
    assert list(counts)[:7] == ["open", "claimed", "trained", "listed", "settled", "twice", "lost"]
    assert (counts["open"], counts["claimed"], counts["listed"]) == (7, 2, 0)
    assert counts["epoch_listed"] == 19


def test_an_open_unit_says_whose_it_is_and_how_far_it_came() -> None:
    row = open_row(unit(), ME)
    assert (row["unit"], row["state"], row["overdue_s"]) == ("1/7", "open", -1.3)
    assert (row["holder"], row["peer"]) == (name_of(OTHER), peer_text(OTHER))
    assert open_row(unit(holder=ME), ME)["holder"] == "this peer"
    assert open_row(unit(holder=None), ME)["peer"] == ""
    assert open_row(unit(claimed=True), ME)["state"] == "claimed"
    assert open_row(unit(in_hand=1, trained=3), ME)["state"] == "claimed"
    assert open_row(unit(listed=1, trained=3), ME)["state"] == "trained"


def test_the_screen_has_every_state_in_words() -> None:
    counts = unit_counts(STATUS, CreditFold(RULES))
    shown = units_text({**counts, "epoch_progress": 0.5, "rows": [open_row(unit(), ME)]})
    first, *_, last = shown.splitlines()
    assert first.split(maxsplit=1) == ["epoch", "1, 50.0 % of 38 sequences listed"]
    assert "done twice" in shown
    assert last.startswith("1/7")
