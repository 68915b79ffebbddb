"""Validity, tables, weight and choice between forks, rule by rule (DESIGN.md 8: 1, 3, 5, 8, 10)."""

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.formats import (
    NO_DIGEST,
    CommitRecord,
    Member,
    SeqRow,
    UnitPiece,
    members_root,
    seqs_root,
)
from dugnad.averaging.lineage import (
    CLOCK_AHEAD_MS,
    SEQS_KEPT_MS,
    TOKENS_MAX,
    Lineage,
)
from dugnad.averaging.node import Node, seq_rows
from dugnad.averaging.pruning import COST_MAX, NODES_MAX, VERSIONS_KEPT, VERSIONS_SURE
from dugnad.averaging.speed import class_speed
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_MS,
    RULES,
    A,
    B,
    C,
    D,
    ack,
    chain,
    commit,
    contribution,
    draft,
    grow,
    listing,
    named,
    root,
    work,
)


@pytest.fixture
def lineage() -> Lineage:
    return Lineage(RULES)


def judged(lineage: Lineage, record: CommitRecord, wall_ms: int | None = None) -> str:
    return lineage.judge(record, record.header.time_ms if wall_ms is None else wall_ms)


def test_an_honest_commit_is_valid(lineage: Lineage) -> None:
    head = chain(lineage, [A, B], 3)[-1]
    record = commit(lineage, head, [listing(contribution(C, 1, head.version))], A)
    assert judged(lineage, record) == ""


HEADERS = {
    "an unknown parent": ({"parent": b"x" * 32}, "parent is unknown"),
    "another run": ({"run": b"x" * 32}, "another run"),
    "another fragment": ({"fragment": 1}, "another run or fragment"),
    "a join without another head": ({"kind": "join"}, "names no other head"),
    "a merge with another head": ({"other": b"x" * 32}, "names another head"),
    "another kind": ({"kind": "split"}, "'split'"),
    "a version too far": ({"version": 3}, "does not follow"),
    "wrong inputs": ({"inputs_root": NO_DIGEST}, "do not match their root"),
    "a wrong total": ({"tokens_total": 1}, "token total"),
    "other members": ({"members_root": NO_DIGEST}, "member table"),
    "other seqs": ({"seqs_root": NO_DIGEST}, "last-seq table"),
}


@pytest.mark.parametrize(("changes", "reason"), HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_does_not_follow_is_refused(
    lineage: Lineage, changes: dict[str, object], reason: str
) -> None:
    (_, parent) = chain(lineage, [A, B], 1)
    good = commit(lineage, parent, [listing(contribution(A, 2, 1))], B)
    bad = CommitRecord(msgspec.structs.replace(good.header, **changes), good.inputs)
    assert reason in judged(lineage, bad)


def test_a_header_may_not_follow_its_parent_sooner_than_the_merge_floor(lineage: Lineage) -> None:
    parent, inputs = lineage.genesis, [listing(contribution(A, 1, 0))]
    floor = parent.time_ms + RULES.merge_floor_ms
    assert judged(lineage, commit(lineage, parent, inputs, A, time_ms=floor)) == ""
    early = commit(lineage, parent, inputs, A, time_ms=floor - 1)
    assert "sooner than the merge floor" in judged(lineage, early)


def test_a_header_may_not_be_dated_more_than_a_minute_ahead(lineage: Lineage) -> None:
    record = commit(lineage, lineage.genesis, [listing(contribution(A, 1, 0))], A)
    ahead = record.header.time_ms - CLOCK_AHEAD_MS
    assert judged(lineage, record, ahead) == ""
    assert "a minute ahead" in judged(lineage, record, ahead - 1)


def test_a_commit_that_lists_nothing_is_refused(lineage: Lineage) -> None:
    assert "lists nothing" in judged(lineage, commit(lineage, lineage.genesis, [], A))


def test_inputs_stand_in_ascending_order_and_once(lineage: Lineage) -> None:
    one, two = listing(contribution(A, 1, 0)), listing(contribution(B, 1, 0))
    for inputs in ([two, one], [one, one]):
        record = commit(lineage, lineage.genesis, inputs, A)
        assert "ascending order" in judged(lineage, record)
    assert judged(lineage, commit(lineage, lineage.genesis, [one, two], A)) == ""


INPUTS = {
    "another fragment": ({"fragment": 1}, "another fragment"),
    "a base that is no older": ({"base": 4}, "not older"),
    "stale": ({"base": 1}, "stale"),
    "no steps": ({"steps": 0}, "no work"),
    "no tokens": ({"tokens": 0, "pieces_root": root("none")}, "no work"),
    "tokens without units": ({"tokens": 1000}, "do not follow from its units"),
    "more than any machine": ({"tokens": TOKENS_MAX + 1}, "more tokens than any"),
    "other units": ({"pieces_root": root("x")}, "do not match their root"),
    "a number listed before": ({"seq": 3}, "already listed"),
    "a replay": ({"seq": 1}, "already listed"),
}


@pytest.mark.parametrize(("changes", "reason"), INPUTS.values(), ids=INPUTS.keys())
def test_a_commit_with_an_input_that_cannot_be_listed_is_refused(
    lineage: Lineage, changes: dict[str, object], reason: str
) -> None:
    head = chain(lineage, [A, B], 3)[-1]
    made = msgspec.structs.replace(contribution(A, 4, 3), **changes)

    record = commit(
        lineage,
        head,
        [msgspec.structs.replace(listing(contribution(A, 4, 3)), contribution=made)],
        B,
    )
    assert reason in judged(lineage, record)


def test_a_contribution_may_be_listed_for_s_versions_after_its_base(lineage: Lineage) -> None:
    nodes = chain(lineage, [A], 4)
    made = contribution(B, 1, 2)
    reasons = [lineage.judge_contribution(made, node, fresh_seq=True) for node in nodes]
    assert [not reason for reason in reasons] == [False, False, True, True, False]


def test_coefficients_are_numbers_and_a_refused_input_counts_nothing(lineage: Lineage) -> None:
    good = listing(contribution(A, 1, 0))
    nan = msgspec.structs.replace(good, coefficients=(float("nan"),))
    assert "not a number" in judged(lineage, commit(lineage, lineage.genesis, [nan], A))
    part = msgspec.structs.replace(good, refusal="too large")
    assert "counts in part" in judged(lineage, commit(lineage, lineage.genesis, [part], A))


def test_a_refused_input_makes_no_member_and_carries_no_weight(lineage: Lineage) -> None:
    inputs = [listing(contribution(A, 1, 0)), listing(contribution(B, 1, 0), 0.0, "too large")]
    record = commit(lineage, lineage.genesis, inputs, A)
    assert judged(lineage, record) == ""
    node = lineage.add(record, named(record))
    assert [row.peer for row in node.members] == [A]
    assert node.tokens_total == 8 * 16
    assert node.seqs[B].seq == 1  # its number is burned


def test_tokens_are_capped_by_class_and_time_for_all_that_a_maker_has(lineage: Lineage) -> None:
    head = chain(lineage, [A, B], 1)[-1]
    many = 4000
    cap = int(class_speed(12) * 1.5 * INTERVAL_MS / 1000)
    one = listing(contribution(A, 2, 1, sequences=many))
    assert lineage.child(draft(head, [one], B), b"", head).weights[A] == cap
    two = [one, listing(contribution(A, 3, 1, sequences=many))]  # two records, one machine
    assert lineage.child(draft(head, two, B), b"", head).weights[A] == cap


def test_a_member_is_one_for_n_versions_after_its_last_contribution(lineage: Lineage) -> None:
    node = grow(lineage, lineage.genesis, [A, B], A)
    for _ in range(RULES.member_versions - 1):
        node = grow(lineage, node, [A], A)
    assert node.member(B)
    node = grow(lineage, node, [A], A)
    assert not node.member(B)
    assert node.seqs[B].seq == 1  # but its numbers are remembered


def test_the_last_seq_of_a_peer_that_left_is_forgotten_after_a_week(lineage: Lineage) -> None:
    node = grow(lineage, lineage.genesis, [A, B], A)
    for _ in range(RULES.member_versions):
        node = grow(lineage, node, [A], A)
    late = grow(lineage, node, [A], A, time_ms=node.time_ms + SEQS_KEPT_MS)
    assert sorted(late.seqs) == sorted([A])
    young = grow(lineage, lineage.genesis, [A, B], A)
    late = grow(lineage, young, [A], A, time_ms=young.time_ms + 2 * SEQS_KEPT_MS)
    assert B in late.seqs  # a member's row stays, however slow the swarm: replays must not pass


# -- forks -----------------------------------------------------------------------------------------


def test_of_two_siblings_the_one_with_more_tokens_of_members_is_better(lineage: Lineage) -> None:
    base = chain(lineage, [A, B], 1)[-1]
    light, heavy = grow(lineage, base, [A], A), grow(lineage, base, [A, B], B)
    assert lineage.better(heavy, light)
    assert not lineage.better(light, heavy)
    assert not lineage.better(heavy, heavy)


def test_heads_are_compared_and_never_siblings(lineage: Lineage) -> None:
    # S1: the chain moved on from the lighter sibling
    base = chain(lineage, [A, B, C], 1)[-1]
    heavy = grow(lineage, base, [A, B], A)
    light = grow(lineage, base, [C], B)
    assert lineage.better(heavy, light)
    moved_on = grow(lineage, light, [A, B, C], C)
    assert lineage.better(moved_on, heavy)


def test_equal_weight_is_decided_by_the_lower_digest(lineage: Lineage) -> None:
    base = chain(lineage, [A, B], 1)[-1]
    one, two = grow(lineage, base, [A], A), grow(lineage, base, [B], B)
    low, high = sorted((one, two), key=lambda n: n.digest)
    assert lineage.better(low, high)
    assert not lineage.better(high, low)


def test_a_descendant_is_always_better(lineage: Lineage) -> None:
    nodes = chain(lineage, [A], 3)
    assert lineage.better(nodes[3], nodes[1])
    assert not lineage.better(nodes[0], nodes[3])


def test_keys_made_after_the_fork_weigh_nothing(lineage: Lineage) -> None:
    base = chain(lineage, [A, B], 1)[-1]
    honest = grow(lineage, base, [A], A)
    sybils = grow(lineage, base, [C, D], C)
    for _ in range(5):
        sybils = grow(lineage, sybils, [C, D], C)
    assert sybils.tokens_total > honest.tokens_total
    assert lineage.better(honest, sybils)


def test_at_version_0_where_nobody_is_a_member_everybody_counts(lineage: Lineage) -> None:
    one, two = grow(lineage, lineage.genesis, [A], A), grow(lineage, lineage.genesis, [B, C], B)
    assert lineage.better(two, one)


def circle(lineage: Lineage) -> list[Node]:
    """Three heads of which each beats one other, since the voters of their forks differ.

    a and b part at a commit whose only member is C, who stands on a's side alone; c parts from them
    one version earlier, where A, B, C and D vote.
    """
    rules = dataclasses.replace(RULES, member_versions=1)
    lineage.rules = rules
    first = grow(lineage, lineage.genesis, [A, B, C, D], A)
    second = grow(lineage, first, [C], A)
    a = grow(lineage, second, [C], A)
    b = grow(lineage, second, [A, B, D], B)
    c = grow(lineage, grow(lineage, first, [A], A), [B, D], D)
    return [a, b, c]


def test_a_circle_of_preferences_has_one_winner_in_whatever_order(lineage: Lineage) -> None:
    a, b, c = circle(lineage)
    assert lineage.better(a, b)
    assert lineage.better(b, c)
    assert lineage.better(c, a)
    winners = {lineage.best(order).digest for order in itertools.permutations([a, b, c])}
    assert winners == {c.digest}  # a wins its young fork from b and then loses the older one


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 15)), min_size=1, max_size=12))
def test_of_any_two_heads_exactly_one_is_better_and_all_orders_agree(
    shape: list[tuple[int, int]],
) -> None:
    lineage = Lineage(RULES)
    nodes = [lineage.genesis]
    for parent, who in shape:
        on = nodes[parent % len(nodes)]
        makers = [peer for i, peer in enumerate((A, B, C, D)) if who >> i & 1]
        nodes.append(grow(lineage, on, makers, makers[0]))
    for one, two in itertools.combinations(nodes, 2):
        assert lineage.better(one, two) != lineage.better(two, one)
        fork = lineage.fork_point(one, two)
        assert fork is not None
        assert fork is lineage.fork_point(two, one)
        assert lineage.is_ancestor(fork, one)
        assert lineage.is_ancestor(fork, two)
    assert lineage.best(nodes) is lineage.best(nodes[::-1])


# -- settlement ------------------------------------------------------------------------------------


def test_what_is_listed_comes_back_by_what_was_clipped(lineage: Lineage) -> None:
    record = commit(lineage, lineage.genesis, [listing(contribution(A, 1, 0), 0.25)], A)
    head = lineage.add(record, named(record))
    assert lineage.returned_share(head, (A, 1), 0) == 0.75
    later = grow(lineage, head, [B], B)
    assert lineage.returned_share(later, (A, 1), 0) == 0.75


def test_what_is_not_listed_comes_back_when_its_window_closes_and_not_sooner(
    lineage: Lineage,
) -> None:
    nodes = chain(lineage, [A], 3)
    shares = [lineage.returned_share(node, (B, 1), 0) for node in nodes]
    assert shares == [0.0, 0.0, 1.0, 1.0]


def test_what_is_not_listed_comes_back_when_a_later_number_is(lineage: Lineage) -> None:
    record = commit(lineage, lineage.genesis, [listing(contribution(A, 2, 0))], A)
    head = lineage.add(record, named(record))
    assert lineage.returned_share(head, (A, 1), 0) == 1.0


def test_across_a_gap_nothing_comes_back_that_may_be_listed_in_it(lineage: Lineage) -> None:
    head = chain(Lineage(RULES), [A, B], 6)[-1]
    other = Lineage(RULES)
    point = Lineage(RULES).checkpoint(head)
    assert point is not None
    node = other.add_checkpoint(point, head.digest)
    assert other.oldest_known(node) == 6
    assert other.returned_share(node, (A, 3), 2) == 0.0  # versions 3 to 5 are not known
    assert other.returned_share(node, (A, 6), 5) == 0.0  # version 6 is known to list it in full
    assert other.returned_share(node, (C, 1), 2) == 1.0  # nothing of C was ever listed


# -- checkpoints and memory ------------------------------------------------------------------------


def test_a_checkpoint_stands_for_the_history_below_it() -> None:
    full = Lineage(RULES)
    nodes = chain(full, [A, B], 5)
    point = full.checkpoint(nodes[4])
    assert point is not None
    other = Lineage(RULES)
    assert other.judge_checkpoint(point) == ""
    other.add_checkpoint(point, nodes[4].digest)
    record = nodes[5].record
    assert record is not None
    assert other.judge(record, record.header.time_ms) == ""
    assert other.add(record, nodes[5].digest).tokens_total == nodes[5].tokens_total
    assert full.checkpoint(full.genesis) is None


def test_a_checkpoint_whose_tables_are_not_the_headers_is_refused() -> None:
    full = Lineage(RULES)
    point = full.checkpoint(chain(full, [A, B], 2)[-1])
    assert point is not None
    replace = msgspec.structs.replace
    header = point.commit.header
    bad = [
        (replace(point, members=point.members[:1]), "member table"),
        (replace(point, seqs=()), "last-seq table"),
        (replace(point, commit=CommitRecord(header, ())), "inputs"),
        (replace(point, commit=CommitRecord(replace(header, fragment=1), ())), "fragment"),
    ]
    for one, reason in bad:
        assert reason in full.judge_checkpoint(one)


ROWS = {
    "descending": ((B, A), (), "ascending"),
    "twice": ((A, A), (), "ascending"),
    "a short key": ((b"x",), (), "wrong length"),
    "a huge seq": ((A,), (SeqRow(A, 1 << 62, 0),), "out of range"),
}


@pytest.mark.parametrize(("peers", "seqs", "reason"), ROWS.values(), ids=ROWS.keys())
def test_a_checkpoint_with_impossible_rows_is_refused(
    peers: tuple[bytes, ...], seqs: tuple[SeqRow, ...], reason: str
) -> None:
    full = Lineage(RULES)
    point = full.checkpoint(chain(full, [A], 1)[-1])
    assert point is not None
    members = tuple(Member(peer, 12, True, 1) for peer in peers)
    header = msgspec.structs.replace(
        point.commit.header,
        members_root=members_root(RULES.run, members),
        seqs_root=seqs_root(RULES.run, seqs),
    )
    made = msgspec.structs.replace(
        point, commit=CommitRecord(header, point.commit.inputs), members=members, seqs=seqs
    )
    assert reason in full.judge_checkpoint(made)


def test_a_chain_is_served_down_to_what_is_known(lineage: Lineage) -> None:
    nodes = chain(lineage, [A], 4)
    assert lineage.chain(nodes[4], [nodes[2].digest]) == (nodes[3:], True)
    assert lineage.chain(nodes[4], [b"x" * 32]) == (nodes[1:], True)  # all of it: to version 0
    other = Lineage(RULES)
    point = lineage.checkpoint(nodes[3])
    assert point is not None
    three = other.add_checkpoint(point, nodes[3].digest)
    assert other.chain(three, [b"x" * 32]) == ([three], False)


def test_memory_is_bounded_however_many_headers_somebody_signs(lineage: Lineage) -> None:
    head = chain(lineage, [A], 3)[-1]
    inputs = [listing(contribution(B, 1, head.version))]
    for number in range(NODES_MAX + 50):
        record = commit(lineage, head, inputs, B, boot=number)
        lineage.add(record, named(record))
        if len(lineage.nodes) > NODES_MAX:
            gone = lineage.prune(head)
            assert head.digest not in gone
    assert len(lineage.nodes) <= NODES_MAX
    assert [node.version for node in lineage.ancestors(head)] == [3, 2, 1, 0]


def test_pruning_keeps_a_lineage_deep_enough_for_an_hour_alone(lineage: Lineage) -> None:
    nodes = chain(lineage, [A], VERSIONS_KEPT + 10)
    assert not lineage.overfull()
    gone = lineage.prune(nodes[-1])
    assert sorted(gone) == sorted(node.digest for node in nodes[1:10])
    assert lineage.oldest_known(nodes[-1]) == 10
    assert lineage.genesis.digest in lineage.nodes
    assert lineage.cost == sum(node.cost for node in lineage.nodes.values())


def test_where_commits_are_large_fewer_are_kept_but_never_too_few(lineage: Lineage) -> None:
    nodes = chain(lineage, [A], VERSIONS_SURE + 40)
    for node in nodes:
        node.cost = COST_MAX // VERSIONS_SURE
    lineage.cost = sum(node.cost for node in nodes)
    assert lineage.overfull()
    lineage.prune(nodes[-1])
    assert lineage.oldest_known(nodes[-1]) == nodes[-1].version - VERSIONS_SURE


def test_witnesses_come_with_the_record(lineage: Lineage) -> None:
    record = commit(lineage, lineage.genesis, [listing(contribution(A, 1, 0))], A)
    signed = CommitRecord(record.header, record.inputs, (ack(B, record),))
    assert lineage.add(signed, named(record)).witnesses == {PeerId(B)}


def test_tables_are_rows_in_ascending_order(lineage: Lineage) -> None:
    head = chain(lineage, [C, A, B], 1)[-1]
    assert [row.peer for row in seq_rows(head)] == [A, B, C]
    assert [row.peer for row in head.members] == [A, B, C]
    assert work(1) == (UnitPiece(0, 0, 0, 1),)
