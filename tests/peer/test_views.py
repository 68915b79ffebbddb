"""Text that strangers wrote."""

import pytest

from dugnad.peer.views import printable


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
