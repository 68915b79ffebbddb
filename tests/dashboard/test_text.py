"""Numbers, times and foreign words."""

import pytest

from dugnad.dashboard import text

from .run_world import HOSTILE  # noqa: TID252  the world is no installed package


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (999, "999"),
        (1234, "1.23 k"),
        (1_000_000, "1.00 M"),
        (0.5, "0.50"),
        (45.67, "45.7"),
    ],
)
def test_amounts_have_three_digits(value: float, words: str) -> None:
    assert text.amount(value) == words


def test_bytes_have_a_unit() -> None:
    assert text.bytes_text(12) == "12 B"
    assert text.bytes_text(63_600_000_000) == "63.6 GB"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (59, "59 s"),
        (65, "1 min 5 s"),
        (3600, "1 h"),
        (93_784, "1 d 2 h"),
        (86_400 * 30, "30 d"),
    ],
)
def test_spans_have_two_units_and_are_never_negative(seconds: float, words: str) -> None:
    assert text.span(seconds) == words


def test_ages_are_never_negative() -> None:
    assert text.ago(5000, 1000) == "0 s ago"
    assert text.ago(0, 7_200_000) == "2 h ago"


def test_foreign_times_cannot_break_a_page() -> None:
    assert text.iso(10**30) == "9999-12-31T23:59:59Z"
    assert text.iso(-5) == "1970-01-01T00:00:00Z"


@pytest.mark.parametrize("words", HOSTILE)
def test_lines_are_bounded_and_printable(words: str) -> None:
    cleaned = text.line(words, 32)
    assert len(cleaned) <= 32
    assert all(c == " " or c.isprintable() for c in cleaned)
    assert text.line(cleaned, 32) == cleaned


def test_paragraphs_keep_their_lines_and_spaces_between_words() -> None:
    assert text.paragraph("a\r\n\x07b\u202e\n") == "a\nb"
    assert text.paragraph("The boat came ") == "The boat came "
    assert len(text.paragraph("x\n" * 10_000, 100)) <= 100
