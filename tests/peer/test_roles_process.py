"""Machines that only evaluate, as real processes beside one that trains."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .processes import Daemons, run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow


def confirmed(peers: Daemons, number: int) -> Any:  # Any: JSON
    found = peers.ask(number, "evaluation")
    if not found or len(found["earned"]) < 2:
        return None
    return found if all(row["evaluated_tokens"] for row in found["earned"]) else None


def alike(peers: Daemons, number: int) -> bool:
    """Whether its own estimate of the held-out loss is like the newest round's: both are of some
    version, and the loss falls fast in the beginning."""
    mine, curve = peers.ask(number, "status")["anchor_loss"], peers.ask(number, "evaluation")
    return bool(curve["curve"][-1]["loss"] == pytest.approx(mine, rel=0.5))


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Daemons]:
    """Daemons that are killed at the end, whatever happened."""
    with Daemons(tmp_path) as found:
        yield found


def test_evaluators_score_confirm_each_other_and_are_assigned_no_work(
    peers: Daemons, tmp_path: Path
) -> None:
    first = peers.launch("start", str(run_file(tmp_path)))
    link = wait_for(partial(peers.link, first), 40.0, "the link")
    boards = [
        peers.launch("join", link, "--set", "roles=evaluate"),
        # too little memory to train in: what its owner asked for cannot be done
        peers.launch("join", link, "--set", "roles=evaluate,train", "--set", "memory_mb=503.8"),
    ]
    found = wait_for(partial(confirmed, peers, first), 90.0, "the confirmed scores")
    trainer = peers.ask(first, "status")
    for number in boards:
        status = peers.ask(number, "status")
        assert status["state"] == "evaluating", peers.log(number)
        assert (status["tokens"], status["step"]) == (0, 0)
        assert status["reason"]
    assert "it cannot train: needs 503.9 MB of memory, has 503.8 MB" in peers.log(boards[1])
    evaluators = {peers.ask(number, "status")["peer"] for number in boards}
    assert {row["peer"] for row in found["earned"]} == evaluators
    assert {row["disputed"] for row in found["earned"]} == {0}
    wait_for(partial(alike, peers, first), 40.0, "one loss by trainer and evaluators")
    holders = {row["peer"] for row in peers.ask(first, "units")["rows"]}
    assert holders == {trainer["peer"]}, "who cannot take a unit is assigned none"
    listed = {row["peer"] for row in peers.ask(first, "leaderboard")["rows"]}
    assert listed == {trainer["peer"]}, "evaluated tokens are no credit for training"
