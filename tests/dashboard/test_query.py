"""What strangers may ask of a table."""

import pytest

from dugnad.dashboard.query import PAGE_MAX, ROWS_PER_PAGE, TableQuery, pages_of, table_query, whole

COLUMNS = {"name": False, "speed": True}


@pytest.mark.parametrize(
    ("text", "number"),
    [("3", 3), ("0", 1), ("-1", 1), ("x", 1), ("٣", 1), ("9" * 40, 1), ("999999999", PAGE_MAX)],
)
def test_page_numbers_are_bounded(text: str, number: int) -> None:
    assert whole(text, 1, PAGE_MAX) == number


def test_unknown_wishes_become_defaults() -> None:
    query = table_query({"sort": "__class__", "dir": "sideways"}, COLUMNS, "speed")
    assert query == TableQuery("speed", True)


def test_an_address_keeps_order_words_and_choices() -> None:
    asked = {"sort": "name", "dir": "down", "q": "a&b", "show": "gone", "page": "4"}
    query = table_query(asked, COLUMNS, "speed", {"show": ("all", "gone")})
    assert query.address("/peers", page=5) == "/peers?sort=name&dir=down&q=a%26b&show=gone&page=5"
    assert query.address("/peers", sort="speed", descending=False).endswith("q=a%26b&show=gone")


def test_a_page_beyond_the_last_is_the_last() -> None:
    assert TableQuery("name", False, page=99).with_page(ROWS_PER_PAGE + 1).page == 2
    assert TableQuery("name", False, page=99).with_page(0).page == 1
    assert pages_of(0) == 0
