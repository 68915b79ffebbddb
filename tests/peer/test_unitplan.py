"""The plan of units."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.peer.unitplan import UnitPlan

SEED = bytes(range(32))


def epoch_of(plan: UnitPlan, epoch: int) -> list[int]:
    return [s for i in range(plan.units_per_epoch) for s in plan.sequences_of(epoch, i)]


@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 5), st.binary(max_size=32))
def test_an_epoch_holds_each_sequence_exactly_once(
    sequences: int, size: int, epoch: int, seed: bytes
) -> None:
    plan = UnitPlan(seed, sequences, size)
    assert sorted(epoch_of(plan, epoch)) == list(range(sequences))
    sizes = [plan.size_of(epoch, i) for i in range(plan.units_per_epoch)]
    assert sum(sizes) == sequences
    assert set(sizes[:-1]) <= {size}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    plan = UnitPlan(SEED, 500, 8)
    orders = [tuple(epoch_of(plan, e)) for e in range(8)]
    orders.append(tuple(epoch_of(UnitPlan(b"other", 500, 8), 0)))
    assert len(set(orders)) == len(orders)
    assert list(range(500)) not in map(list, orders)


def test_the_order_is_well_mixed() -> None:
    plan = UnitPlan(SEED, 4096, 16)
    order = epoch_of(plan, 3)
    in_place = sum(a == b for a, b in enumerate(order))
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert in_place <= 8  # 1 expected
    assert neighbours <= 12  # 2 expected
    assert abs(sum(order[:2048]) / 2048 - 2047.5) < 80  # three standard deviations


def test_a_place_is_found_without_a_table_in_a_huge_epoch() -> None:
    plan = UnitPlan(SEED, 10**13 + 7, 64)
    unit = plan.sequences_of(2, plan.units_per_epoch - 2)
    assert len(set(unit)) == 64
    assert all(0 <= s < 10**13 + 7 for s in unit)


def test_positions_number_units_through_the_epochs() -> None:
    plan = UnitPlan(SEED, 21, 4)
    assert plan.units_per_epoch == 6
    assert plan.size_of(0, 5) == 1
    assert plan.position(2, 3) == 15
    assert plan.unit(15) == (2, 3)
    assert plan.has(2, 5, 1)
    assert not plan.has(2, 5, 2)
    assert not plan.has(2, 6, 1)
    assert not plan.has(-1, 0, 1)


def test_impossible_plans_and_units_are_refused() -> None:
    for sequences, size in ((0, 4), (1 << 49, 4), (10, 0), (10, 65_537)):
        with pytest.raises(ValueError, match="sequences"):
            UnitPlan(SEED, sequences, size)
    plan = UnitPlan(SEED, 10, 4)
    for epoch, index in ((-1, 0), (0, 3), (0, -1)):
        with pytest.raises(ValueError, match="no unit"):
            plan.sequences_of(epoch, index)


def test_the_order_is_the_published_one() -> None:
    """A golden vector: a peer that orders otherwise would train and claim other people's units."""
    assert UnitPlan(SEED, 1000, 8).sequences_of(1, 0) == GOLDEN


GOLDEN = [305, 803, 982, 323, 48, 788, 31, 822]

PROGRAM = """
from dugnad.peer.unitplan import UnitPlan
from dugnad.peer.rendezvous import Participant, owner
from dugnad.dht.ids import PeerId
plan = UnitPlan(bytes(range(32)), 1000, 8)
peers = [Participant(PeerId(bytes([n]) * 32), 1 + n) for n in range(5)]
print([plan.sequences_of(e, i) for e in range(3) for i in range(20)])
print([owner(e, i, peers)[0] for e in range(3) for i in range(20)])
"""


@pytest.mark.slow
def test_the_plan_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
