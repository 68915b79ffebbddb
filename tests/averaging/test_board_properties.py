"""What the board promises, for any lineage: judged by a second, naive way to count the same."""

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.board import DAY_MS, HALF_LIFE_DAYS, RECENT_DAYS, board_json, recent_score
from dugnad.averaging.credit import CreditFold, unit_fragment
from dugnad.averaging.formats import (
    Ack,
    CommitRecord,
    Contribution,
    Input,
    UnitPiece,
    inputs_root,
    sign_record,
)
from dugnad.averaging.receiptcheck import commit_reason
from dugnad.dht.ids import PeerId, peer_text
from dugnad.dht.records import verify_ed25519

from ..peer.receipt_world import PEOPLE, Made  # noqa: TID252  the tests are no installed package
from .test_credit import (  # noqa: TID252
    PEERS,
    RULES,
    RUN,
    Chain,
    chains,
    folded,
    listing,
    owned,
    row,
)

Sequence = tuple[int, int, int]


def sequences(piece: UnitPiece, fragment: int) -> set[Sequence]:
    """The sequences of a piece that can be credited in a fragment: none of an impossible one."""
    mine = piece.index < RULES.units and piece.stop <= RULES.unit_size(piece.index)
    if not mine or unit_fragment(RUN, piece.epoch, piece.index, RULES.fragments) != fragment:
        return set()
    return {(piece.epoch, piece.index, n) for n in range(piece.start, piece.stop)}


def counted(chain: Chain) -> dict[str, tuple[int, int]]:
    """(settled, pending) tokens of each peer, counted by going through all sequences by hand."""
    seen: set[Sequence] = set()
    settled, pending = Counter[str](), Counter[str]()
    homes = [commit.header.home for _, commit in chain.commits]
    for version, (_, commit) in enumerate(chain.commits, start=1):
        for one in commit.inputs:
            peer = one.contribution.peer
            for piece in () if one.refusal else one.pieces:
                new = sequences(piece, chain.fragment) - seen
                seen |= new
                deep = version <= len(homes) - RULES.horizon
                others = set(homes[version:]) - {homes[version - 1]}
                sure = deep and (peer != homes[version - 1] or bool(others))
                target = settled if sure else pending
                target[peer_text(PeerId(peer))] += len(new) * RULES.sequence_tokens
    return {peer: (settled[peer], pending[peer]) for peer in settled | pending}


@settings(max_examples=15)
@given(chains(0, versions=10))
def test_credit_is_what_others_confirmed_each_sequence_once(chain: Chain) -> None:
    board = folded(chain).board()
    told = {one.peer: (one.tokens, one.provisional) for one in board.rows}
    expected = counted(chain)
    assert {peer: told[peer] for peer in expected} == expected
    assert board.tokens + board.provisional == sum(map(sum, expected.values()))


@settings(max_examples=15)
@given(chains(0, versions=6), st.integers(1, 12), st.sampled_from(PEERS), st.data())
def test_no_number_of_own_commits_and_own_acks_settles_own_work(
    chain: Chain, more: int, home: PeerId, data: st.DataObject
) -> None:
    start = len(chain.commits)
    for index in owned(0)[:more]:
        acks = data.draw(st.lists(st.just(home), max_size=2))
        chain.add(home, [listing(home, 0, [UnitPiece(7, index, 0, 1)])], acks)
    fold = folded(chain)
    for digest, commit in chain.commits[start:]:
        fold.acknowledge(Ack(home, 0, commit.header.version, digest))
        assert not fold.witnessed(digest)[0]
    assert row(fold, home)["tokens"] == counted(chain).get(peer_text(home), (0, 0))[0]


@settings(max_examples=20)
@given(chains(1, versions=8))
def test_settled_credit_only_rises_as_commits_come(chain: Chain) -> None:
    fold, before = CreditFold(RULES), dict.fromkeys(PEERS, 0)
    for digest, commit in chain.commits:
        fold.apply(commit, digest)
        now = {one.peer: one.tokens for one in fold.board().rows}
        after = {peer: now.get(peer_text(peer), 0) for peer in PEERS}
        assert all(after[peer] >= before[peer] for peer in PEERS)
        before = after


@settings(max_examples=10)
@given(chains(0), chains(1), chains(2), st.randoms(use_true_random=False))
def test_the_same_receipts_in_any_order_give_the_same_bytes(
    a: Chain, b: Chain, c: Chain, rng: Random
) -> None:
    first, other = folded(a, b, c), CreditFold(RULES)
    queues = [list(chain.commits) for chain in (a, b, c)]
    while any(queues):
        digest, commit = rng.choice([q for q in queues if q]).pop(0)
        other.apply(commit, digest)
    assert board_json(first.board()) == board_json(other.board())


@settings(max_examples=50)
@given(
    st.dictionaries(st.integers(100, 160), st.integers(1, 10**9), max_size=10),
    st.integers(160, 163),
)
def test_the_recent_score_halves_every_seven_days(days: dict[int, int], today: int) -> None:
    now = recent_score(days, today * DAY_MS)
    for weeks in range(1, (RECENT_DAYS - 63) // HALF_LIFE_DAYS + 1):
        later = recent_score(days, (today + HALF_LIFE_DAYS * weeks) * DAY_MS)
        assert abs(later - now / 2**weeks) <= 1 + len(days)


@pytest.fixture(scope="module")
def made() -> Made:
    """A run with signed merges."""
    return Made().go(2)


@settings(max_examples=40)
@given(data=st.data())
def test_a_receipt_changed_in_any_field_is_refused_whoever_lists_it(
    made: Made, data: st.DataObject
) -> None:
    _, record = made.commits[data.draw(st.integers(0, len(made.commits) - 1))]
    place = data.draw(st.integers(0, len(record.inputs) - 1))
    one = record.inputs[place]
    field = data.draw(st.sampled_from(Contribution.__struct_fields__))
    forged = msgspec.structs.replace(
        one.contribution, **{field: _other(getattr(one.contribution, field))}
    )
    assert _judged(made, record, place, msgspec.structs.replace(one, contribution=forged))


@settings(max_examples=20)
@given(data=st.data())
def test_a_receipt_of_one_place_is_none_in_another(made: Made, data: st.DataObject) -> None:
    """Replayed: in a commit of another fragment, twice in one, or for another run."""
    _, record = made.commits[data.draw(st.integers(0, len(made.commits) - 1))]
    _, other = made.commits[data.draw(st.integers(0, len(made.commits) - 1))]
    if other.header.fragment != record.header.fragment:
        assert _judged(made, record, 0, other.inputs[0])
    assert _judged(made, record, 0, record.inputs[1])
    assert commit_reason(
        record, made.run, made.manifest.data.context + 1, verify_ed25519, record.header.time_ms
    )


@settings(max_examples=15)
@given(chains(0, versions=5), st.data())
def test_a_replayed_receipt_adds_no_credit(chain: Chain, data: st.DataObject) -> None:
    listed = [one for _, commit in chain.commits for one in commit.inputs]
    before = counted(chain)
    for _ in range(3):
        again = data.draw(st.lists(st.sampled_from(listed), max_size=2)) if listed else []
        chain.add(data.draw(st.sampled_from(PEERS)), again)
    board = folded(chain).board()
    assert board.tokens + board.provisional == sum(map(sum, before.values()))


def _other(value: object) -> object:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "4"
        case bytes():
            return bytes([value[0] ^ 1]) + value[1:]
    raise AssertionError(f"no other value for {value!r}")


def _judged(made: Made, record: CommitRecord, place: int, one: Input) -> str:
    """What is said of the commit with another receipt at `place`, signed anew by its home."""
    inputs = (*record.inputs[:place], one, *record.inputs[place + 1 :])
    header = msgspec.structs.replace(record.header, inputs_root=inputs_root(made.run, inputs))
    home = next(who for who in PEOPLE if who.peer == header.home)
    signed = CommitRecord(sign_record(header, made.run, home), inputs)
    context = made.manifest.data.context
    return commit_reason(signed, made.run, context, verify_ed25519, header.time_ms)
