"""Credit as a fold: order-free between fragments, undone exactly, and no token credited twice."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging import creditchain
from dugnad.averaging.board import DAY_MS, board_json
from dugnad.averaging.credit import (
    UNDO_MAX,
    CoverageChange,
    CreditError,
    CreditFold,
    CreditRules,
    unit_fragment,
)
from dugnad.averaging.foldstate import decode_state, fold_root
from dugnad.averaging.formats import (
    NO_DIGEST,
    Ack,
    CommitRecord,
    Contribution,
    Header,
    HeadRow,
    Input,
    UnitPiece,
)
from dugnad.dht.ids import PeerId, RunId, peer_text
from dugnad.dht.records import encode

RUN = RunId(hashlib.sha256(b"a run").digest())
RULES = CreditRules(
    RUN, fragments=3, sequence_tokens=10, unit_sequences=4, epoch_sequences=38, horizon=4
)
PEERS = [PeerId(hashlib.sha256(bytes([n])).digest()) for n in range(5)]
START_MS = 1_800_000_000_000


def owned(fragment: int, epoch: int = 0, rules: CreditRules = RULES) -> list[int]:
    """The units of an epoch that are credited in a fragment."""
    return [
        i for i in range(rules.units) if unit_fragment(RUN, epoch, i, rules.fragments) == fragment
    ]


def listing(peer: PeerId, fragment: int, pieces: Sequence[UnitPiece], refusal: str = "") -> Input:
    tokens = sum(p.stop - p.start for p in pieces) * RULES.sequence_tokens
    contribution = Contribution(
        peer=peer,
        fragment=fragment,
        seq=1,
        base=0,
        base_digest=NO_DIGEST,
        tokens=tokens,
        steps=1,
        speed_class=4,
        eligible=True,
        codec="int8",
        payload_root=NO_DIGEST,
        payload_bytes=0,
        pieces_root=NO_DIGEST,
    )
    return Input(contribution, tuple(pieces), 1.0, (1.0,), refusal)


@dataclass
class Chain:
    """Makes the commits of one fragment, one after the other."""

    fragment: int
    interval_ms: int = 1000
    commits: list[tuple[bytes, CommitRecord]] = field(default_factory=list)

    def add(
        self, home: PeerId, inputs: Sequence[Input], acks: Sequence[PeerId] = ()
    ) -> tuple[bytes, CommitRecord]:
        parent = self.commits[-1][0] if self.commits else NO_DIGEST
        version = len(self.commits) + 1
        header = Header(
            format=1,
            run=RUN,
            kind="merge",
            fragment=self.fragment,
            version=version,
            parent=parent,
            home=home,
            boot=1,
            time_ms=START_MS + version * self.interval_ms,
            members_root=NO_DIGEST,
            inputs_root=hashlib.sha256(encode(tuple(inputs))).digest(),
            inputs_count=len(inputs),
            tokens_total=0,
            eta_bits=0,
            mu_bits=0,
            codec="int8",
            payload_root=NO_DIGEST,
            payload_bytes=0,
            theta_root=NO_DIGEST,
            momentum_root=NO_DIGEST,
            seqs_root=NO_DIGEST,
        )
        digest = hashlib.sha256(encode(header)).digest()
        words = tuple(Ack(peer, self.fragment, version, digest) for peer in acks)
        self.commits.append((digest, CommitRecord(header, tuple(inputs), words)))
        return self.commits[-1]

    def branch(self, version: int) -> "Chain":
        """Another lineage that shares the first ``version`` commits."""
        return Chain(self.fragment, self.interval_ms, self.commits[:version])


def fill(chain: Chain, versions: int, homes: Sequence[PeerId] = PEERS) -> Chain:
    """Add commits that list nothing new, by changing homes."""
    for _ in range(versions):
        chain.add(homes[len(chain.commits) % len(homes)], [listing(PEERS[0], chain.fragment, [])])
    return chain


def folded(*chains: Chain, rules: CreditRules = RULES) -> CreditFold:
    fold = CreditFold(rules)
    for chain in chains:
        fold.follow(chain.fragment, chain.commits)
    return fold


def row(fold: CreditFold, peer: PeerId) -> dict[str, int]:
    """A peer's row of the board, all zero when it has none."""
    rows = {one.peer: msgspec.to_builtins(one) for one in fold.board().rows}
    empty = dict.fromkeys(("tokens", "provisional", "unwitnessed", "twice", "units", "recent"), 0)
    return {**empty, **rows.get(peer_text(peer), {})}


pieces = st.builds(
    lambda epoch, index, start, length: UnitPiece(epoch, index, start, start + length),
    st.integers(0, 2),
    st.integers(0, RULES.units),
    st.integers(0, 3),
    st.integers(1, 4),
)


@st.composite
def chains(draw: st.DrawFn, fragment: int, versions: int = 8) -> Chain:
    """A random lineage of one fragment, with overlapping, foreign and impossible pieces."""
    chain = Chain(fragment)
    for _ in range(draw(st.integers(0, versions))):
        makers = draw(st.lists(st.sampled_from(PEERS), min_size=1, max_size=3, unique=True))
        inputs = [
            listing(
                maker,
                fragment,
                draw(st.lists(pieces, max_size=6)),
                draw(st.sampled_from(["", "", "", "stale"])),
            )
            for maker in sorted(makers)
        ]
        chain.add(
            draw(st.sampled_from(PEERS)),
            inputs,
            draw(st.lists(st.sampled_from(PEERS), max_size=2)),
        )
    return chain


def state_of(fold: CreditFold) -> tuple[bytes, bytes, list[UnitPiece]]:
    """All that can be seen of a fold."""
    return board_json(fold.board()), encode(fold.snapshot()), list(fold.covered_pieces())


def test_a_unit_belongs_to_one_fragment_and_fragments_get_about_equally_many() -> None:
    counts = [0] * 8
    for index in range(4000):
        counts[unit_fragment(RUN, 3, index, 8)] += 1
    assert all(400 < count < 600 for count in counts)
    assert unit_fragment(RUN, 3, 7, 8) == unit_fragment(RUN, 3, 7, 8)


def test_a_unit_counts_only_in_the_fragment_that_it_hashes_to() -> None:
    unit = owned(1)[0]
    piece = UnitPiece(0, unit, 0, 4)
    for fragment in range(3):
        fold = CreditFold(RULES)
        digest, commit = Chain(fragment).add(PEERS[1], [listing(PEERS[0], fragment, [piece])])
        change = fold.apply(commit, digest)
        assert change == CoverageChange(covered=(piece,) if fragment == 1 else ())
        assert fold.covered(0, unit) == (0b1111 if fragment == 1 else 0)


def test_what_was_covered_before_is_counted_as_twice_for_its_contributor() -> None:
    unit = owned(0)[0]
    chain = Chain(0)
    chain.add(PEERS[3], [listing(PEERS[0], 0, [UnitPiece(0, unit, 0, 2)])])
    chain.add(PEERS[4], [listing(PEERS[1], 0, [UnitPiece(0, unit, 1, 4)])])
    fold = folded(fill(chain, 4))
    assert (row(fold, PEERS[0])["tokens"], row(fold, PEERS[0])["twice"]) == (20, 0)
    assert (row(fold, PEERS[1])["tokens"], row(fold, PEERS[1])["twice"]) == (20, 10)
    assert (row(fold, PEERS[0])["units"], row(fold, PEERS[1])["units"]) == (0, 1)
    assert fold.units_covered == fold.board().units_covered == 1


def test_the_first_input_of_a_commit_wins_what_two_of_it_cover() -> None:
    piece = UnitPiece(0, owned(0)[0], 0, 4)
    chain = Chain(0)
    chain.add(PEERS[4], [listing(PEERS[0], 0, [piece]), listing(PEERS[1], 0, [piece])])
    fold = folded(fill(chain, 4))
    assert row(fold, PEERS[0])["tokens"] == 40
    assert row(fold, PEERS[1])["twice"] == 40


@pytest.mark.parametrize(
    "piece",
    [
        UnitPiece(0, 10**9, 0, 1),
        UnitPiece(0, 9, 0, 3),
        UnitPiece(10**12, owned(0, 10**12)[0], 0, 1),
        UnitPiece(-1, 0, 0, 1),
    ],
)
def test_a_piece_outside_the_data_or_far_ahead_earns_nothing(piece: UnitPiece) -> None:
    chain = Chain(0)
    chain.add(PEERS[4], [listing(PEERS[0], 0, [piece])])
    fold = folded(fill(chain, 4))
    assert row(fold, PEERS[0])["tokens"] == row(fold, PEERS[0])["twice"] == 0


def test_a_refused_input_earns_nothing_and_is_counted_as_refused() -> None:
    chain = Chain(0)
    chain.add(PEERS[4], [listing(PEERS[0], 0, [UnitPiece(0, owned(0)[0], 0, 4)], "stale")])
    board = folded(chain).board()
    assert (board.receipts, board.refused, board.rows) == (1, 1, ())


def test_credit_is_provisional_until_its_commit_is_f_versions_deep() -> None:
    chain = Chain(0)
    chain.add(PEERS[4], [listing(PEERS[0], 0, [UnitPiece(0, owned(0)[0], 0, 4)])])
    fold = folded(fill(chain, 3))
    assert (fold.settled(0), row(fold, PEERS[0])["provisional"]) == (0, 40)
    assert (row(fold, PEERS[0])["tokens"], fold.board().as_of_ms) == (0, 0)
    fold.follow(0, fill(chain, 1).commits)
    assert (fold.settled(0), row(fold, PEERS[0])["provisional"]) == (1, 0)
    assert row(fold, PEERS[0])["tokens"] == 40
    assert fold.board().as_of_ms == START_MS + 1000


def test_an_ack_answers_a_question_but_only_the_chain_moves_the_board() -> None:
    home, other = PEERS[0], PEERS[1]
    chain = Chain(0)
    piece = UnitPiece(0, owned(0)[0], 0, 4)
    digest, _ = chain.add(home, [listing(home, 0, [piece]), listing(other, 0, [])])
    fold = folded(fill(chain, 8, [home]))
    assert row(fold, home)["tokens"] == 0
    assert row(fold, home)["provisional"] == row(fold, home)["unwitnessed"] == 40
    assert not fold.acknowledge(Ack(home, 0, 1, digest)), "a home cannot confirm itself"
    assert fold.acknowledge(Ack(PEERS[2], 0, 1, digest)), "new, but a stranger's word"
    assert fold.acknowledge(Ack(other, 0, 1, digest))
    assert not fold.acknowledge(Ack(other, 0, 1, digest)), "nothing new the second time"
    assert fold.witnessed(digest)[0]
    assert row(fold, home)["tokens"] == 0, "peers know different acks; boards must not differ"
    fold.follow(0, fill(chain, 1, [other]).commits)
    assert row(fold, home)["tokens"] == 40


def test_building_on_a_commit_confirms_it() -> None:
    home, other = PEERS[0], PEERS[1]
    chain = Chain(0)
    digest, _ = chain.add(home, [listing(home, 0, [UnitPiece(0, owned(0)[0], 0, 4)])])
    fold = folded(fill(chain, 4, [home]))
    assert row(fold, home)["tokens"] == 0
    fold.follow(0, fill(chain, 1, [other]).commits)
    assert fold.witnessed(digest) == (True, "the home of version 6 built on it")
    assert row(fold, home)["tokens"] == 40


def test_unwitnessed_tokens_wait_in_the_base_and_are_credited_when_somebody_builds_on_it() -> None:
    home, other = PEERS[0], PEERS[1]
    chain = Chain(0)
    chain.add(home, [listing(home, 0, [UnitPiece(0, owned(0)[0], 0, 4)])])
    fill(chain, 2 * UNDO_MAX, [home])
    fold = folded(chain)
    assert row(fold, home)["unwitnessed"] == 40
    again = CreditFold.restore(RULES, fold.snapshot())
    again.follow(0, chain.commits)
    assert board_json(again.board()) == board_json(fold.board())
    for _ in range(2 * UNDO_MAX):
        fold.follow(0, fill(chain, 1, [other]).commits)
        assert (row(fold, home)["tokens"], row(fold, home)["provisional"]) == (40, 0)


def test_a_commit_that_does_not_follow_changes_nothing() -> None:
    chain = fill(Chain(0), 3)
    fold = folded(chain.branch(1))
    before = state_of(fold)
    other = fill(Chain(0, interval_ms=7), 2)
    for digest, commit in (chain.commits[2], other.commits[1]):
        with pytest.raises(CreditError):
            fold.apply(commit, digest)
    with pytest.raises(CreditError):
        fold.undo(chain.commits[2][0])
    with pytest.raises(CreditError):
        fold.follow(0, other.commits[1:])
    with pytest.raises(CreditError):
        fold.follow(9, chain.commits)
    assert state_of(fold) == before


@pytest.mark.slow
@given(chains(0), chains(1), chains(2), st.randoms(use_true_random=False))
def test_the_order_between_fragments_does_not_matter(
    a: Chain, b: Chain, c: Chain, rng: Random
) -> None:
    one, other = folded(a, b, c), CreditFold(RULES)
    queues = [list(chain.commits) for chain in (a, b, c)]
    while any(queues):
        queue = rng.choice([q for q in queues if q])
        digest, commit = queue.pop(0)
        other.apply(commit, digest)
    assert state_of(one) == state_of(other)


@pytest.mark.slow
@given(chains(0), st.integers(0, 8))
def test_apply_then_undo_restores_everything(chain: Chain, keep: int) -> None:
    fold = folded(chain.branch(keep))
    before = state_of(fold)
    changes = [fold.apply(commit, digest) for digest, commit in chain.commits[keep:]]
    for (digest, _), change in zip(chain.commits[:keep:-1], changes[:0:-1], strict=True):
        assert fold.undo(digest).uncovered == change.covered
    for digest, _ in chain.commits[keep : keep + 1]:
        fold.undo(digest)
    assert state_of(fold) == before


@pytest.mark.slow
@given(chains(0, versions=12), chains(1, versions=12))
def test_no_token_is_credited_twice(a: Chain, b: Chain) -> None:
    fold = folded(a, b)
    board = fold.board()
    covered = sum(p.stop - p.start for p in fold.covered_pieces())
    assert board.tokens + board.provisional == covered * RULES.sequence_tokens
    valid = 0
    for chain in (a, b):
        for _, commit in chain.commits:
            for one in commit.inputs:
                for p in one.pieces if not one.refusal else ():
                    mine = p.index < RULES.units and p.stop <= RULES.unit_size(p.index)
                    if mine and unit_fragment(RUN, p.epoch, p.index, 3) == chain.fragment:
                        valid += p.stop - p.start
    assert board.tokens + board.provisional + board.twice == valid * RULES.sequence_tokens


@pytest.mark.slow
@given(chains(0, versions=14))
def test_settled_credit_never_falls_while_the_lineage_grows(chain: Chain) -> None:
    fold, before = CreditFold(RULES), dict.fromkeys(PEERS, 0)
    for digest, commit in chain.commits:
        fold.apply(commit, digest)
        now = {peer: row(fold, peer)["tokens"] for peer in PEERS}
        assert all(now[peer] >= before[peer] for peer in PEERS)
        before = now


@pytest.mark.slow
@given(chains(0), st.integers(0, 8), st.data())
def test_going_over_to_another_lineage_equals_having_followed_it_always(
    chain: Chain, fork: int, data: st.DataObject
) -> None:
    other = data.draw(chains(0))
    branch = chain.branch(fork)
    for _, commit in other.commits:
        branch.add(PEERS[1], commit.inputs)
    fold = folded(chain)
    before = set(_sequences(fold.covered_pieces()))
    change = fold.follow(0, branch.commits)
    if len(branch.commits) > fork or len(chain.commits) <= fork:
        assert state_of(fold) == state_of(folded(branch))
    after = set(_sequences(fold.covered_pieces()))
    assert set(_sequences(change.covered)) == after - before
    assert set(_sequences(change.uncovered)) == before - after


def _sequences(found: Iterable[UnitPiece]) -> list[tuple[int, int, int]]:
    return [(p.epoch, p.index, s) for p in found for s in range(p.start, p.stop)]


def long_chain(fragment: int, epochs: int) -> Chain:
    """A lineage that covers whole epochs, half a unit a commit, by changing peers."""
    chain = Chain(fragment, interval_ms=DAY_MS // 4)
    for epoch in range(epochs):
        for index in owned(fragment, epoch):
            size = RULES.unit_size(index)
            for part in (UnitPiece(epoch, index, 0, 1), UnitPiece(epoch, index, 1, size)):
                peer = PEERS[len(chain.commits) % 5]
                chain.add(PEERS[(index * 7 + epoch) % 5], [listing(peer, fragment, [part])])
    return fill(chain, UNDO_MAX)


def test_finished_epochs_collapse_and_still_count_as_covered() -> None:
    made = [long_chain(fragment, 6) for fragment in range(3)]
    fold = folded(*made)
    assert all(not one.masks and one.done >= 6 for one in fold.snapshot().fragments)
    assert fold.coverage(2).units_covered == RULES.units
    assert fold.coverage(2).sequences_covered == RULES.epoch_sequences
    assert fold.units_covered == 6 * RULES.units
    assert fold.board().tokens == 6 * 38 * 10
    late = made[0].add(PEERS[2], [listing(PEERS[1], 0, [UnitPiece(1, owned(0, 1)[0], 0, 2)])])
    assert fold.apply(late[1], late[0]) == CoverageChange()
    assert row(fold, PEERS[1])["twice"] == 20


def test_an_epoch_that_was_finished_by_a_recent_commit_can_still_be_undone() -> None:
    chain = Chain(0)
    last = owned(0)[-1]
    for index in owned(0)[:-1]:
        size = RULES.unit_size(index)
        chain.add(PEERS[1], [listing(PEERS[0], 0, [UnitPiece(0, index, 0, size)])])
    fill(chain, UNDO_MAX + 5)
    fold = folded(chain)
    rest = UnitPiece(0, last, 0, RULES.unit_size(last))
    digest, commit = chain.add(PEERS[2], [listing(PEERS[3], 0, [rest])])
    before = state_of(fold.restore(RULES, fold.snapshot()))
    fold.apply(commit, digest)
    assert fold.coverage(0).units_covered == len(owned(0))
    assert fold.snapshot().fragments[0].done == 0
    assert fold.undo(digest) == CoverageChange(uncovered=(rest,))
    assert state_of(fold.restore(RULES, fold.snapshot()))[2] == before[2]
    assert not fold.covered(0, last)


def test_a_newcomer_with_the_base_and_the_newest_commits_has_the_same_board() -> None:
    made = [long_chain(fragment, 5) for fragment in range(3)]
    fold = folded(*made)
    state = decode_state(encode(fold.snapshot()))
    assert fold_root(state) == fold_root(fold.snapshot())
    newcomer = CreditFold.restore(RULES, state)
    heads = [HeadRow(c.fragment, len(c.commits), c.commits[-1][0]) for c in made]
    lacking = newcomer.missing(heads)
    assert len(lacking) == 3 * UNDO_MAX
    for fragment, version in lacking:
        digest, commit = made[fragment].commits[version - 1]
        newcomer.apply(commit, digest)
    assert newcomer.missing(heads) == ()
    assert state_of(newcomer) == state_of(fold)


def test_a_newcomer_without_a_base_is_told_what_it_lacks() -> None:
    chain = fill(Chain(1), 6)
    fold = folded(chain.branch(2))
    assert fold.missing([HeadRow(1, 5, chain.commits[4][0])]) == ((1, 3), (1, 4), (1, 5))
    other = fill(Chain(1, interval_ms=3), 2)
    assert fold.missing([HeadRow(1, 2, other.commits[1][0])]) == ((1, 2),)
    assert fold.missing([HeadRow(1, 1, chain.commits[0][0])]) == ()


def test_a_lineage_deeper_than_the_journal_needs_a_reset() -> None:
    chain = long_chain(0, 4)
    other = fill(Chain(0, interval_ms=5), len(chain.commits))
    fold = folded(chain)
    with pytest.raises(CreditError, match="connect"):
        fold.follow(0, other.commits)
    fold.reset(0)
    fold.follow(0, other.commits)
    assert state_of(fold) == state_of(folded(other))


def test_a_reset_says_what_is_uncovered() -> None:
    chain = Chain(0)
    piece = UnitPiece(0, owned(0)[0], 1, 3)
    chain.add(PEERS[4], [listing(PEERS[0], 0, [piece])])
    fold = folded(chain)
    assert fold.reset(0) == CoverageChange(uncovered=(piece,))
    assert fold.tip(0) == (0, b"")


def test_peers_beyond_the_bound_share_a_row_and_no_token_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [long_chain(fragment, 4) for fragment in range(3)]
    apart = folded(*made).board()
    monkeypatch.setattr(creditchain, "PEERS_MAX", 2)
    pooled = folded(*made).board()
    assert "everyone else" in {one.name for one in pooled.rows}
    assert (pooled.tokens, pooled.units_covered) == (apart.tokens, apart.units_covered)


def test_a_base_of_another_run_is_refused() -> None:
    state = msgspec.structs.replace(CreditFold(RULES).snapshot(), run=bytes(32))
    with pytest.raises(CreditError, match="another run"):
        CreditFold.restore(RULES, state)


def test_a_horizon_deeper_than_what_can_be_undone_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon"):
        CreditFold(dataclasses.replace(RULES, horizon=UNDO_MAX))
