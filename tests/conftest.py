"""What all tests share: hypothesis without a stopwatch, and the same examples on every CI run."""

import datetime
import os

import pytest
from hypothesis import settings

# Two busy cores make a per-example deadline a coin toss, so none is set.
settings.register_profile("dugnad", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("dugnad")

# Decided once, before the workers start: two of them around midnight must collect the same tests.
os.environ.setdefault("TEST_SEED", str(datetime.date.today().toordinal()))

LONGEST = (
    "peer/test_swarm_process.py",
    "simulation/test_runner.py",
    "peer/test_demo_run.py",
    "simulation/test_exchange_world.py",
    "net/test_net_swarm.py",
    "simulation/test_numericstage.py",
    "peer/test_run_end_process.py",
    "dht/test_roster_chaos.py",
    "benchmarks/test_churn.py",
    "peer/test_trainer.py",
)
"""Files that begin first, longest first, those that wait for processes between those that compute:
two workers then end together, and seldom start two swarms at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then whatever else starts processes, then the quick ones."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    path = item.path.as_posix()
    for turn, name in enumerate(LONGEST):
        if path.endswith("/tests/" + name):
            return turn
    slow = item.path.stem.endswith("_process") or "tests/net/" in path
    return len(LONGEST) + (0 if slow else 1)
