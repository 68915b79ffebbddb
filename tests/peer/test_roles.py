"""Which roles a machine takes, and who shares the work."""

from dugnad.dht.ids import PeerId
from dugnad.peer.contract import Contract
from dugnad.peer.roles import Duties, Machine, advertised, duties, sharing, without_training
from dugnad.peer.unitplan import UnitPlan
from dugnad.peer.units import Interval, Units

TRAIN = Contract(800_000_000, ("float32",), 1e12, splittable=True, attempts=3)
EVALUATE = Contract(400_000_000, ("float32",), 3e11, splittable=True, attempts=3)
PREPARE = Contract(200_000_000, (), 0.0, splittable=True, attempts=3)
CONTRACTS = {"train": TRAIN, "evaluate": EVALUATE, "prepare": PREPARE}
FAST = {"float32": 1e11}
A, B, C = (PeerId(bytes([n]) * 32) for n in (1, 2, 3))


def machine(megabytes: int, flops: dict[str, float] | None = None) -> Machine:
    return Machine(megabytes * 1_000_000, FAST if flops is None else flops, frozenset({"cpu"}))


def test_a_machine_does_what_its_owner_asked_for() -> None:
    assert duties(("train",), CONTRACTS, machine(2000)) == Duties(("train",))
    both = duties(("evaluate", "train"), CONTRACTS, machine(2000))
    assert both == Duties(("train", "evaluate"))
    assert "train" in both


def test_a_machine_that_cannot_train_evaluates_and_says_why() -> None:
    found = duties(("train",), CONTRACTS, machine(500))
    assert found.roles == ("evaluate",)
    assert found.why == (
        "it cannot train: needs 800 MB of memory, has 500 MB; it evaluates instead"
    )
    assert duties(("train", "evaluate"), CONTRACTS, machine(500)).roles == ("evaluate",)


def test_a_machine_that_can_compute_nothing_prepares_units_and_says_why() -> None:
    found = duties(("train",), CONTRACTS, machine(300))
    assert found.roles == ("prepare",)
    assert found.why == (
        "it cannot train: needs 800 MB of memory, has 300 MB; "
        "nor can it evaluate: needs 400 MB of memory, has 300 MB; it prepares units instead"
    )
    assert duties(("evaluate",), CONTRACTS, machine(300)).roles == ("prepare",)
    assert duties(("prepare",), CONTRACTS, machine(300, {"bfloat16": 1.0})) == Duties(("prepare",))
    both = duties(("prepare", "train"), CONTRACTS, machine(2000))
    assert without_training(both, CONTRACTS, "it died").roles == ("evaluate", "prepare")


def test_a_machine_that_can_do_nothing_for_the_run_has_no_role_and_both_reasons() -> None:
    found = duties(("train",), CONTRACTS, machine(100))
    assert found.roles == ()
    assert "cannot train: needs 800 MB" in found.why
    assert "nor can it evaluate: needs 400 MB" in found.why
    assert "nor can it prepare: needs 200 MB" in found.why
    assert duties(("evaluate",), CONTRACTS, machine(100)).roles == ()


def test_nobody_is_made_to_train_who_did_not_ask_for_it() -> None:
    assert duties(("evaluate",), CONTRACTS, machine(4000)).roles == ("evaluate",)


def test_a_machine_that_was_never_measured_tries_and_falls_back_when_its_learner_fails() -> None:
    known = duties(("train",), CONTRACTS, machine(2000, {}))
    assert known.roles == ("train",)
    found = without_training(known, CONTRACTS, "the model fits on no device")
    assert found.roles == ("evaluate",)
    assert found.why == "it cannot train: the model fits on no device; it evaluates instead"


def test_a_peer_that_rests_offers_no_work_and_still_merges() -> None:
    known = Duties(("train", "evaluate"))
    assert advertised(known, may_work=True, can_home=True) == ("train", "evaluate", "merge")
    assert advertised(known, may_work=False, can_home=True) == ("merge",)
    assert advertised(known, may_work=False, can_home=False) == ()


def test_who_does_not_train_is_assigned_nothing_be_it_a_member_or_new() -> None:
    said = {A: True, B: False, C: False}
    found = sharing(b"c", ((A, 10), (B, 10)), ((C, 12), (A, 11)), lambda p: said[p])
    assert (found.members, found.newcomers) == (((A, 10),), ())
    core = Units(A, UnitPlan(b"seed", 400, 4), TRAIN, sequence_tokens=100)
    core.handle(Interval(10.0), 0.0)
    core.handle(found, 0.0)
    assert {core.owner_of((0, n)) for n in range(100)} == {A}


def test_newcomers_count_beside_the_members_once() -> None:
    found = sharing(b"c", ((A, 10),), ((C, 12), (B, 9), (A, 99)), lambda p: True)
    assert found.members == ((A, 10),)
    assert found.newcomers == ((B, 9), (C, 12))
