"""Owners: a bond takes two signatures, either side ends it, and order changes nothing."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.board import DAY_MS, Basis, Owner, Tally, board_json, machine_rows, make_board
from dugnad.averaging.owners import Bond, accept, bond_fault, offer, release
from dugnad.averaging.statements import (
    AHEAD,
    AHEAD_MS,
    CROWDED,
    HELD_ALREADY,
    RECOUNT_MS,
    STATEMENT_BYTES_MAX,
    UNLISTED_MAX,
    StatementSet,
)
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId, name_of, peer_text
from dugnad.dht.records import encode

OWNER, OTHER, EVE = (Identity.ephemeral(bytes([n]) * 32) for n in (1, 2, 3))
MACHINES = [Identity.ephemeral(bytes([n]) * 32) for n in range(10, 14)]
RUN = RunId(b"r" * 32)
NOW = 1_764_500_000_000
BASIS = Basis(as_of_ms=100 * DAY_MS, receipts=9, refused=1, versions=(7,), settled=(3,))


def bond(owner: Identity, machine: Identity, number: int = NOW, name: str = "") -> Bond:
    return accept(offer(owner, machine.peer, name, number), machine)


def held(*bonds: Bond) -> StatementSet:
    found = StatementSet(RUN, lambda peer: True)
    for one in bonds:
        assert found.take(encode(one), NOW) == ""
    return found


def test_a_bond_of_both_sides_holds_and_fits_its_bound() -> None:
    made = bond(OWNER, MACHINES[0], name="𒐫" * 32)
    assert bond_fault(made) == ""
    ended = release(msgspec.structs.replace(made, number=1 << 62), OWNER)
    assert len(encode(ended)) <= STATEMENT_BYTES_MAX


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (offer(OWNER, MACHINES[0].peer, "", NOW), "not accepted"),
        (msgspec.structs.replace(bond(OWNER, MACHINES[0]), owner=EVE.peer), "not signed"),
        (msgspec.structs.replace(bond(OWNER, MACHINES[0]), peer=EVE.peer), "not signed"),
        (msgspec.structs.replace(bond(OWNER, MACHINES[0]), number=NOW + 1), "not signed"),
        (msgspec.structs.replace(bond(OWNER, MACHINES[0]), name="me"), "not signed"),
        (msgspec.structs.replace(bond(OWNER, MACHINES[0]), accepted=b"s" * 64), "not accepted"),
        (msgspec.structs.replace(bond(OWNER, MACHINES[0]), released=b"s" * 64), "somebody else"),
    ],
)
def test_nobody_claims_a_machine_or_an_owner_without_the_other_side(
    forged: Bond, reason: str
) -> None:
    assert reason in StatementSet(RUN, lambda peer: True).take(encode(forged), NOW)


def test_only_the_two_sides_sign_and_no_key_owns_itself() -> None:
    made = bond(OWNER, MACHINES[0])
    with pytest.raises(ValueError, match="for another peer"):
        accept(made, EVE)
    with pytest.raises(ValueError, match="only the owner and the machine"):
        release(made, EVE)
    with pytest.raises(ValueError, match="cannot own itself"):
        offer(OWNER, OWNER.peer, "", NOW)
    with pytest.raises(ValueError, match="the name has control"):
        offer(OWNER, MACHINES[0].peer, "a\u202eb", NOW)
    assert "owns itself" in bond_fault(msgspec.structs.replace(made, owner=made.peer))


def test_the_signature_of_one_side_is_no_signature_of_the_other() -> None:
    bare = offer(OWNER, MACHINES[0].peer, "", NOW)
    swapped = msgspec.structs.replace(bare, owner=bare.peer, peer=bare.owner)
    for one in (
        msgspec.structs.replace(swapped, signature=b"", accepted=bare.signature),
        msgspec.structs.replace(bare, accepted=bare.signature),
    ):
        assert bond_fault(one)


@pytest.mark.parametrize("side", [OWNER, MACHINES[0]])
def test_either_side_ends_a_bond_and_only_a_newer_one_revives_it(side: Identity) -> None:
    made = bond(OWNER, MACHINES[0])
    found = held(made, release(made, side))
    assert found.said().owners == {}
    assert found.take(encode(made), NOW) == HELD_ALREADY
    assert found.take(encode(bond(OWNER, MACHINES[0], NOW + 1)), NOW) == ""
    assert found.said().owners == {MACHINES[0].peer: Owner(OWNER.peer)}


def test_the_newest_owner_and_the_newest_name_count() -> None:
    found = held(
        bond(OWNER, MACHINES[0], NOW, "old"),
        bond(OWNER, MACHINES[1], NOW + 5, "new"),
        bond(OWNER, MACHINES[2], NOW),
        bond(OTHER, MACHINES[2], NOW + 1, "hers"),
    )
    assert found.said().owners == {
        MACHINES[0].peer: Owner(OWNER.peer, "new"),
        MACHINES[1].peer: Owner(OWNER.peer, "new"),
        MACHINES[2].peer: Owner(OTHER.peer, "hers"),
    }


def test_keys_that_claim_each_other_stay_apart() -> None:
    a, b, c = MACHINES[:3]
    assert held(bond(a, b), bond(b, a)).said().owners == {}
    assert held(bond(a, b), bond(b, c), bond(c, a)).said().owners == {}
    chain = held(bond(a, b), bond(b, c)).said().owners
    assert chain == {b.peer: Owner(a.peer)}, "a machine owns nothing"


_BONDS = [
    made
    for owner in (OWNER, OTHER, MACHINES[0])
    for machine in MACHINES[:3]
    if owner is not machine
    for one in [bond(owner, machine, NOW + n, name) for n, name in ((0, "x"), (1, "y"))]
    for made in (one, release(one, owner), release(one, machine))
]


@settings(max_examples=30)
@given(st.sets(st.integers(0, len(_BONDS) - 1)), st.randoms(use_true_random=False))
def test_the_same_statements_in_any_order_give_the_same_set_and_owners(
    chosen: set[int], rng: Random
) -> None:
    first, second = (StatementSet(RUN, lambda peer: True, lambda *signed: True) for _ in range(2))
    order = sorted(chosen)
    for number in order:
        first.take(encode(_BONDS[number]), NOW)
    rng.shuffle(order)
    for number in order * 2:
        second.take(encode(_BONDS[number]), NOW)
    assert first.everything() == second.everything()
    assert first.names() == second.names()
    assert first.said().owners == second.said().owners


def test_statements_about_peers_without_receipts_are_bounded() -> None:
    listed: set[PeerId] = set()
    found = StatementSet(RUN, listed.__contains__, lambda peer, message, signature: True)

    def about(number: int) -> bytes:
        return encode(Bond(OWNER.peer, number.to_bytes(32, "big"), NOW))

    for number in range(1, UNLISTED_MAX + 1):
        assert found.take(about(number), NOW) == ""
    assert found.take(about(0xFFFF), NOW) == CROWDED
    listed.add(PeerId((0xFFFF).to_bytes(32, "big")))
    assert found.take(about(0xFFFF), NOW) == ""
    assert found.take(about(0xFFFE), NOW) == CROWDED
    listed.add(PeerId((1).to_bytes(32, "big")))
    assert found.take(about(0xFFFE), NOW + 1) == CROWDED, "counted anew once a minute"
    assert found.take(about(0xFFFE), NOW + RECOUNT_MS) == ""
    assert found.take(encode(Bond(OWNER.peer, b"p" * 32, NOW + AHEAD_MS + 1)), NOW) == AHEAD
    for junk in (b"", b"\xc1", b"x" * (STATEMENT_BYTES_MAX + 1), encode(("z", 1))):
        assert found.take(junk, NOW)
    assert len(found.names()) == UNLISTED_MAX + 2
    assert found.get([b"?" * 32, *found.names()[:2]]) == found.everything()[:2]


def test_machines_of_one_owner_are_one_row_that_opens() -> None:
    peers = [one.peer for one in MACHINES]
    totals = {peer: Tally(tokens=10 * n, units=1) for n, peer in enumerate(peers, start=1)}
    for n, peer in enumerate(peers, start=1):
        totals[peer].days = {100: 10 * n}
        totals[peer].contributions = 1
        totals[peer].seen(n, 100 + n)
    owners = {peers[0]: Owner(OWNER.peer, "Kari"), peers[3]: Owner(OWNER.peer, "Kari")}
    board = make_board(totals, BASIS, owners)
    first = board.rows[0]
    assert (first.name, first.peer, first.rank) == ("Kari", peer_text(OWNER.peer), 1)
    assert (first.tokens, first.recent, first.share, first.units) == (50, 50, 0.5, 2)
    assert (first.first_ms, first.last_ms, first.contributions) == (1, 104, 2)
    assert [row.peer for row in first.machines] == [peer_text(peers[3]), peer_text(peers[0])]
    assert {row.owner for row in first.machines} == {first.peer}
    assert board.tokens == 100 == sum(row.tokens for row in machine_rows(board))
    assert [row.rank for row in board.rows] == [1, 2, 3]
    backwards = dict(reversed(totals.items()))
    assert board_json(make_board(backwards, BASIS, owners)) == board_json(board)
    unnamed = make_board(totals, BASIS, {peers[0]: Owner(OWNER.peer)})
    assert name_of(OWNER.peer) in {row.name for row in unnamed.rows}
