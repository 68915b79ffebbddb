"""Text that strangers wrote."""

import pytest

from dugnad.peer.views import printable, text_fault


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("blåbær 数", "blåbær 数"),
        ("a\x1b[31mred\r\nnext", "a[31mrednext"),
        ("right\u202eleft", "rightleft"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("line\u2028two", "linetwo"),
        ("\ud800", ""),
    ],
)
def test_what_cannot_be_seen_is_dropped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_text_is_cut_visibly() -> None:
    assert printable("x" * 1000, 8) == "xxxxxxx…"


def test_a_manifest_may_not_hold_such_text_at_all() -> None:
    assert text_fault("plain", 5) == ""
    assert "6 characters" in text_fault("longer", 5)
    assert "invisible" in text_fault("a\u202eb", 80)
