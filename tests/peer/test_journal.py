"""The journal numbers events and makes foreign text harmless."""

from __future__ import annotations

from dugnad.peer.journal import KEPT, Journal


def test_events_are_numbered_and_asked_for_from_a_number() -> None:
    journal = Journal()
    for n in range(5):
        journal.add("peer", f"event {n}", peer="abc")
    rows = journal.since(3)
    assert [row.n for row in rows] == [4, 5]
    assert rows[0].text == "event 3"
    assert rows[0].data == {"peer": "abc"}


def test_the_journal_is_bounded_and_its_text_printable() -> None:
    journal = Journal()
    for _ in range(KEPT + 10):
        journal.add("note", "a\x1b[31m\u202eb" + "c" * 5000)
    rows = journal.since(0)
    assert rows[0].n == 11
    assert "\x1b" not in rows[0].text
    assert "\u202e" not in rows[0].text
    assert len(rows[0].text) <= 300
