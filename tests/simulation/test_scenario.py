"""Scenarios as data: strict about keys, options drawn from the seed, one draw shifting no other."""

from __future__ import annotations

import pytest

from dugnad.simulation.scenario import ScenarioError, draw, names, text_of

HEAD = 'title = "t"\n'


@pytest.mark.parametrize("name", names())
def test_every_scenario_of_the_package_can_be_played_with_any_seed(name: str) -> None:
    text = text_of(name)
    for seed in range(30):
        drawn = draw(name, text, seed)
        assert drawn.scenario.title
        assert drawn.scenario.seconds > max((one.at_s for one in drawn.scenario.event), default=0)


def test_the_issue_s_list_is_covered() -> None:
    issues = {draw(name, text_of(name), 0).scenario.issue for name in names()}
    assert issues >= {1, 2, 3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[swarm]\npears = 4\n", "pears"),
        ("[swarm]\npeers = 0\n", "swarm.peers"),
        ('[swarm]\npeers = "four"\n', "swarm.peers"),
        ("[swarm]\npeers = 3\noutbound = 3\n", "swarm.outbound"),
        ("[weather]\nrain = 0.5\n", "rain"),
        ("[weather]\nloss = 1.5\n", "weather.loss"),
        ('[[event]]\nat_s = 1\ndo = "explode"\n', "explode"),
        ('[[event]]\nat_s = 1000\ndo = "kill"\n', "at_s"),
        ('[[event]]\nat_s = 1\ndo = "kill"\nwho = "nobody"\n', "nobody"),
        ('[[event]]\nat_s = 1\ndo = "kill"\nwho = "actor"\n', "upon"),
        ("[hold]\nmerge_gap = 1\n", "merge_gap"),
        ("seconds = { low = 9, high = 3 }\n", "seconds"),
        ("seconds = []\n", "seconds"),
        ("seconds = [\n", "scenario bad"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ScenarioError, match=named):
        draw("bad", HEAD + text, 0)


def test_a_scenario_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match="kill-any"):
        text_of("kill-nobody")


def test_options_are_drawn_from_the_seed_and_differ_between_seeds() -> None:
    text = HEAD + "seconds = { low = 10.0, high = 90.0 }\n[swarm]\npeers = [3, 5, 7]\n"
    drawn = [draw("x", text, seed) for seed in range(20)]
    assert {one.scenario.swarm.peers for one in drawn} == {3, 5, 7}
    assert all(10.0 <= one.scenario.seconds <= 90.0 for one in drawn)
    assert draw("x", text, 4).options == drawn[4].options != drawn[5].options


def test_an_option_more_shifts_no_other() -> None:
    text = HEAD + "[swarm]\npeers = { low = 3, high = 9 }\n"
    more = text + "interval_s = { low = 1.0, high = 9.0 }\n"
    for seed in range(10):
        one, other = draw("x", text, seed), draw("x", more, seed)
        assert one.options["swarm.peers"] == other.options["swarm.peers"]
