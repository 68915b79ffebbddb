"""What evaluators earn, on the page of the board and apart from it."""

from dugnad.dashboard import events as ev
from dugnad.dashboard.evaluatedtable import evaluated_section, prepared_section
from dugnad.dashboard.layout import View
from dugnad.dashboard.state import State, apply

ROW = ev.EvaluatedRow("12D3KooWa<b>", 5120, 512, 0)


def test_evaluated_tokens_have_a_table_of_their_own() -> None:
    state = apply(State(), ev.Evaluations(at_ms=5, rows=(ROW,)))
    assert state.board is None
    shown = str(evaluated_section(View(state, 6)))
    assert "Who evaluates it" in shown
    assert 'data-v="5120"' in shown
    assert "<b>" not in shown, "a key is hostile text"


def test_prepared_tokens_have_another_table() -> None:
    row = ev.PreparedRow("12D3KooWa<b>", 4096, 0, 128)
    state = apply(State(), ev.Preparations(at_ms=5, rows=(row,) * (ev.EVALUATORS_MAX + 1)))
    assert len(state.prepared) == ev.EVALUATORS_MAX
    shown = str(prepared_section(View(state, 6)))
    assert "Who prepares its text" in shown
    assert 'data-v="4096"' in shown
    assert "<b>" not in shown, "a key is hostile text"
    assert "evaluates" not in str(evaluated_section(View(state, 6)))


def test_where_nobody_evaluates_or_prepares_nothing_is_shown() -> None:
    assert "prepares" not in str(prepared_section(View(State(), 6)))
    assert "evaluates" not in str(evaluated_section(View(State(), 6)))


def test_only_so_many_evaluators_are_kept() -> None:
    rows = (ROW,) * (ev.EVALUATORS_MAX + 1)
    assert len(apply(State(), ev.Evaluations(at_ms=5, rows=rows)).evaluated) == ev.EVALUATORS_MAX
