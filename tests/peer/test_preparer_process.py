"""Machines that only prepare units, as real processes, and one that trains on what they made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .processes import Daemons, run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow

TEXT_BYTES = 5 << 18
"""Two shards of hexadecimal digits by chance: ln 16 = 2.77 nats each, which nobody learns to
foresee."""
LOSS_LEAST = 2.5
SLOW = ("--set", "download_mbit=2")
"""Five seconds for the text."""
LONG_S = 180.0
"""For what takes seconds: CI is three times as slow, and does other things besides."""


class Hidden:
    """The texts of some daemons, under other names: they hand out no shard, and who has a text
    open reads on. So that training begins before the text comes, however slow the machine is."""

    def __init__(self, peers: Daemons, numbers: list[int]) -> None:
        homes = [peers.folder / f"home{number}" for number in numbers]
        self.paths = [path for home in homes for path in home.rglob("*.tokens")]
        assert len(self.paths) == len(numbers), "each has the text"
        for path in self.paths:
            path.rename(path.with_suffix(".hidden"))

    def show(self) -> None:
        """From now on the shards can be had."""
        for path in self.paths:
            path.with_suffix(".hidden").rename(path)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Daemons]:
    """Daemons that are killed at the end, whatever happened."""
    with Daemons(tmp_path) as found:
        yield found


def confirmed(peers: Daemons, number: int) -> Any:  # Any: JSON
    found = peers.ask(number, "evaluation")
    rows = found["prepared"] if found else []
    return rows if len(rows) == 2 and all(row["prepared_tokens"] for row in rows) else None


def early(peers: Daemons, number: int) -> Any:  # Any: JSON
    found = peers.ask(number, "status")
    return found if found and found["tokens"] and found["units_before_text"] else None


def whole(peers: Daemons, number: int) -> Any:  # Any: JSON
    found = peers.ask(number, "status")
    return found if found and found["units_before_text"] is None else None


def test_a_trainer_begins_with_units_that_two_others_prepared_before_it_has_the_text(
    peers: Daemons, tmp_path: Path
) -> None:
    path = run_file(tmp_path)
    text = tmp_path / "text" / "a.txt"
    text.write_bytes(random.Random(2).randbytes(TEXT_BYTES // 2).hex().encode())
    first = peers.launch("start", str(path))
    link = wait_for(partial(peers.link, first), LONG_S, "the link")
    boards = [
        peers.launch("join", link, "--set", "roles=prepare"),
        # too little memory to train or evaluate in: what its owner asked for cannot be done
        peers.launch("join", link, "--set", "memory_mb=400"),
    ]
    found = wait_for(partial(confirmed, peers, first), LONG_S, "the prepared tokens")
    assert {row["disputed"] for row in found} == {0}
    hidden = Hidden(peers, [first, *boards])
    late = peers.launch("join", link, *SLOW)
    status = wait_for(partial(early, peers, late), LONG_S, "training before the text is there")
    assert status["train_loss"] > LOSS_LEAST, "it learns from the text, and not from holes"
    for number in boards:
        status = peers.ask(number, "status")
        assert status["state"] == "preparing", peers.log(number)
        assert (status["tokens"], bool(status["reason"])) == (0, True)
        assert status["prepared_tokens"] > 0
    assert "nor can it evaluate: needs" in peers.log(boards[1])
    assert "it prepares units instead" in peers.log(boards[1])
    hidden.show()
    wait_for(partial(whole, peers, late), LONG_S, "the text")
    tokens = peers.ask(late, "status")["tokens"]
    wait_for(lambda: peers.ask(late, "status")["tokens"] > tokens, LONG_S, "training afterwards")
    assert "units came before it" in peers.log(late)
    assert "has another hash" not in peers.log(late)
    listed = {row["peer"] for row in peers.ask(first, "leaderboard")["rows"]}
    preparers = {peers.ask(number, "status")["peer"] for number in boards}
    assert not listed & preparers, "prepared tokens are no credit for training"
