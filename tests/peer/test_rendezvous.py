"""Weighted rendezvous hashing."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.speed import class_weight
from dugnad.dht.ids import PeerId
from dugnad.peer import rendezvous
from dugnad.peer.rendezvous import Ownership, Participant, owner


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


UNITS = [(epoch, index) for epoch in range(2) for index in range(20)]
swarms = st.dictionaries(st.integers(0, 60), st.integers(-6, 20), min_size=1, max_size=9).map(
    lambda classes: {peer(n): class_weight(c) for n, c in classes.items()}
)


def owners(weights: dict[PeerId, int]) -> dict[tuple[int, int], PeerId]:
    participants = [Participant(p, w) for p, w in weights.items()]
    return {unit: owner(*unit, participants) for unit in UNITS}


@settings(max_examples=25)
@given(swarms, st.randoms(use_true_random=False))
def test_the_owner_does_not_depend_on_the_order_of_the_participants(
    weights: dict[PeerId, int], rng: random.Random
) -> None:
    shuffled = list(weights.items())
    rng.shuffle(shuffled)
    assert owners(dict(shuffled)) == owners(weights)


@settings(max_examples=25)
@given(swarms, st.integers(0, 60))
def test_when_a_peer_goes_only_its_units_move(weights: dict[PeerId, int], number: int) -> None:
    joined = {**weights, peer(number): class_weight(10)}
    left = {p: w for p, w in joined.items() if p != peer(number)}
    if not left:
        return
    before, after = owners(joined), owners(left)
    assert all(after[u] == before[u] for u in UNITS if before[u] != peer(number))
    assert peer(number) not in after.values()


@settings(max_examples=25)
@given(swarms)
def test_a_peer_that_gets_faster_only_gains(weights: dict[PeerId, int]) -> None:
    one = min(weights)
    before, after = owners(weights), owners({**weights, one: weights[one] * 2})
    assert all(after[u] in (before[u], one) for u in UNITS)
    assert all(after[u] == one for u in UNITS if before[u] == one)


@pytest.mark.slow
def test_shares_are_proportional_to_the_weights() -> None:
    classes = [20, 20, 20, 14, 17, 23]
    participants = [Participant(peer(n), class_weight(c)) for n, c in enumerate(classes)]
    total = sum(p.weight for p in participants)
    count = Counter(owner(0, index, participants) for index in range(30_000))
    for one in participants:
        share = one.weight / total
        spread = math.sqrt(share * (1 - share) / 30_000)
        assert abs(count[one.peer] / 30_000 - share) < 4 * spread + 0.002 * share


@settings(max_examples=25)
@given(st.lists(swarms, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_remembered_owners_equal_computed_ones(
    history: list[dict[PeerId, int]], rng: random.Random
) -> None:
    ownership = Ownership(b"")
    for weights in history:
        merged = {**weights, **dict(list(ownership.participants.items())[1:])}
        ownership.change(merged)
        asked = rng.sample(UNITS, 25)
        expected = owners(merged)
        assert {u: ownership.owner(*u) for u in asked} == {u: expected[u] for u in asked}
        if len(merged) > 1:
            rest = [Participant(p, w) for p, w in merged.items() if p != expected[UNITS[0]]]
            assert ownership.heir(*UNITS[0]) == owner(*UNITS[0], rest)


def test_nobody_owns_what_nobody_shares() -> None:
    with pytest.raises(ValueError, match="nobody"):
        owner(0, 0, [])
    assert Ownership(b"").owner(0, 0) is None
    alone = Ownership(b"")
    alone.change({peer(1): 1})
    assert alone.owner(0, 0) == peer(1)
    assert alone.heir(0, 0) is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "OWNERS_CACHED_MAX", 50)
    monkeypatch.setattr(rendezvous, "PARTICIPANTS_MAX", 3)
    ownership = Ownership(b"")
    ownership.change({peer(n): 1 for n in range(9)})
    assert set(ownership.participants) == {peer(0), peer(1), peer(2)}
    for index in range(200):
        ownership.owner(0, index)
    assert not ownership.known(0, 149)
    assert ownership.known(0, 150)


def test_the_whole_number_logarithm_is_close_and_never_zero() -> None:
    rng = random.Random(1)
    samples = [0, 1, 2**63, 2**64 - 1, *(rng.getrandbits(64) for _ in range(2000))]
    for bits in samples:
        exact = -math.log2((2 * bits + 1) / 2**65) if bits < 2**64 - 1 else 0.0
        cost = rendezvous._cost(bits)
        assert cost > 0
        assert cost / 2**48 == pytest.approx(exact, rel=0.002, abs=1e-12)


def test_owners_are_the_published_ones() -> None:
    """A golden vector: peers that compute other owners train each other's units."""
    participants = [Participant(peer(n), class_weight(20 + n)) for n in range(6)]
    got = "".join(str(owner(1, index, participants, b"run")[-1]) for index in range(40))
    assert got == GOLDEN


GOLDEN = "5254554532252355554334554144555253412142"
