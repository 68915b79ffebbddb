"""Escaping, in the one place where it happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dashboard.markup import el, join

from .run_world import checked  # noqa: TID252  the world is no installed package


def test_children_and_attributes_are_escaped() -> None:
    made = el("p", "<b>&", el("i", "x"), None, ["y", 3], title='"><script>', cls="note")
    assert made == ('<p title="&quot;&gt;&lt;script&gt;" class="note">&lt;b&gt;&amp;<i>x</i>y3</p>')


def test_absent_attributes_are_left_out_and_flags_have_no_value() -> None:
    assert el("input", hidden=True, value=None, disabled=False) == "<input hidden>"
    assert join("a<", el("br")) == "a&lt;<br>"


@given(st.text(), st.text())
def test_no_text_ever_becomes_markup(inner: str, attribute: str) -> None:
    read = checked(el("p", inner, title=attribute))
    assert [name for name, _ in read.elements] == ["p"]


def test_a_child_that_is_neither_text_nor_list_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no child"):
        el("p", object())
