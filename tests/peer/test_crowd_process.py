"""A crowd of real processes: more daemons than a mesh holds train, merge, lose one, take one in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .processes import Daemons, run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow

MESH = ("--set", "mesh_max=4")
COUNT = 5


def merged(daemons: Daemons, number: int, versions: int) -> bool:
    status = daemons.ask(number, "status")
    return bool(status) and min(status["versions"]) >= versions


def sees(daemons: Daemons, number: int, count: int) -> bool:
    status = daemons.ask(number, "status")
    return bool(status) and status["peers_live"] == count


def states(daemons: Daemons, number: int) -> list[str]:
    rows: list[dict[str, Any]] = daemons.ask(number, "peers") or []
    return [row["state"] for row in rows]


def listed_makers(daemons: Daemons, number: int) -> set[str]:
    board = daemons.ask(number, "leaderboard") or {"rows": []}
    return {row["peer"] for row in board["rows"]}


def test_more_daemons_than_a_mesh_holds_train_as_one_and_bear_a_kill_and_a_newcomer(
    tmp_path: Path,
) -> None:
    with Daemons(tmp_path) as daemons:
        daemons.cpu_share = "0.1"
        daemons.launch("start", str(run_file(tmp_path)), *MESH)
        link = wait_for(partial(daemons.link, 0), 60.0, "the link")
        for _ in range(COUNT - 1):
            daemons.launch("join", link, *MESH)
        for number in range(COUNT):
            wait_for(partial(sees, daemons, number, COUNT), 90.0, f"all in the view of {number}")
        wait_for(
            lambda: any("indirect" in states(daemons, n) for n in range(COUNT)),
            60.0,
            "a pair without a stream",
        )
        for number in range(COUNT):
            wait_for(partial(merged, daemons, number, 2), 90.0, f"two versions at {number}")
        wait_for(lambda: len(listed_makers(daemons, 1)) == COUNT, 90.0, "work of all listed")

        daemons.processes[0].kill()  # the first one, the link's only seed
        alive = range(1, COUNT)
        for number in alive:
            wait_for(partial(sees, daemons, number, COUNT - 1), 60.0, f"the loss at {number}")

        late = daemons.launch("join", daemons.link(1), *MESH)
        for number in (*alive, late):
            wait_for(partial(sees, daemons, number, COUNT), 90.0, f"the newcomer at {number}")
        wait_for(
            lambda: (daemons.ask(late, "status") or {}).get("join_to_listed_s"), 90.0, "its listing"
        )
        wait_for(
            lambda: len(listed_makers(daemons, 2)) == COUNT + 1, 90.0, "its work on another's board"
        )
