"""What a join may say, and what a lineage is after it (DESIGN.md rule 11)."""

import msgspec
import pytest

from dugnad.averaging.formats import NO_DIGEST, CommitRecord, Input, SeqRow, inputs_root
from dugnad.averaging.join import AMENDED
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.outer import bits_of

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    RULES,
    RUN,
    A,
    B,
    C,
    D,
    commit,
    listing,
    named,
    root,
)
from .join_makers import add, branch, join_of, made_on  # noqa: TID252  a helper of these tests


@pytest.fixture
def lineage() -> Lineage:
    return Lineage(RULES)


def split(lineage: Lineage, ours: int = 7, theirs: int = 6) -> tuple[Node, Node, Node]:
    """The fork, the head of A, B and C, and that of D alone."""
    fork = branch(lineage, lineage.genesis, [A, B, C, D], 2)[-1]
    return fork, branch(lineage, fork, [A, B, C], ours)[-1], branch(lineage, fork, [D], theirs)[-1]


def judged(lineage: Lineage, record: CommitRecord) -> str:
    return lineage.judge(record, record.header.time_ms)


def joined(lineage: Lineage, head: Node, other: Node) -> Node:
    record = join_of(lineage, head, other, A)
    assert judged(lineage, record) == ""
    return lineage.add(record, named(record))


def test_a_join_lists_the_other_side_and_its_tables_follow(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    node = joined(lineage, head, other)
    assert set(node.listed) == {(D, seq) for seq in range(3, 9)}
    assert node.seqs[D] == SeqRow(D, 8, node.time_ms)
    assert node.seqs[A] == head.seqs[A]
    assert node.member(D)
    assert not head.member(D) or head.version - 2 < RULES.member_versions
    assert node.tokens_total == head.tokens_total + 6 * 128
    assert all(lineage.returned_share(node, (D, seq), seq - 1) == 0.0 for seq in range(3, 9))


def test_a_join_is_better_than_either_side(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    node = joined(lineage, head, other)
    assert lineage.better(node, head)
    assert lineage.better(node, other)
    later = branch(lineage, other, [D], 2)[-1]
    assert lineage.better(node, later)


def test_what_a_join_took_in_belongs_to_its_lineage(lineage: Lineage) -> None:
    fork, head, other = split(lineage)
    later = branch(lineage, other, [D], 2)
    assert len(lineage.unjoined(other, head)) == 6
    node = joined(lineage, head, other)
    on_top = branch(lineage, node, [A, B, C, D], 1)[-1]
    assert lineage.unjoined(other, on_top) == []
    assert [one.digest for one in lineage.unjoined(later[-1], on_top)] == [
        later[1].digest,
        later[0].digest,
    ]
    assert other.digest in lineage.covered(on_top)
    assert other.digest not in lineage.covered(head)
    assert fork.digest in lineage.covered(head)


def test_a_head_is_joined_once(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    record = join_of(lineage, head, other, A)
    node = lineage.add(record, named(record))
    again = commit(
        lineage,
        node,
        [made_on(node, D, 99)],
        A,
        **{
            name: getattr(record.header, name)
            for name in ("kind", "other", "alpha_bits", "eta_bits", "mu_bits", "codec")
        },
    )
    assert "lists already" in judged(lineage, again)


HEADERS = {
    "no other head": ({"other": NO_DIGEST}, "names no other head"),
    "rates of a merge": ({"mu_bits": bits_of(0.5)}, "rates other than 1 and 0"),
    "a coarse payload": ({"codec": "int8"}, "'int8'"),
    "more than half": ({"alpha_bits": bits_of(0.6)}, "not 0 to a half"),
    "less than nothing": ({"alpha_bits": bits_of(-0.1)}, "not 0 to a half"),
    "no number": ({"alpha_bits": bits_of(float("nan"))}, "not 0 to a half"),
    "no bits": ({"alpha_bits": 1 << 40}, "32 bits"),
}


@pytest.mark.parametrize(("changes", "reason"), HEADERS.values(), ids=HEADERS.keys())
def test_a_join_that_contradicts_itself_is_refused(
    lineage: Lineage, changes: dict[str, object], reason: str
) -> None:
    _, head, other = split(lineage)
    assert reason in judged(lineage, join_of(lineage, head, other, A, **changes))


def relisted(record: CommitRecord, lineage: Lineage, head: Node, inputs: list[Input]) -> str:
    header = msgspec.structs.replace(
        record.header, inputs_root=inputs_root(RUN, tuple(inputs)), inputs_count=len(inputs)
    )
    return judged(lineage, CommitRecord(header, tuple(inputs)))


def test_a_join_cannot_list_again_what_its_lineage_lists(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    record = join_of(lineage, head, other, A)
    mine = next(iter(head.listed.values()))
    assert "its own lineage again" in relisted(record, lineage, head, [mine, *record.inputs])


def test_a_join_lists_no_refused_inputs_but_amendments(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    record = join_of(lineage, head, other, A)
    refused = msgspec.structs.replace(record.inputs[0], clip=0.0, refusal="it is late")
    assert "refused input" in relisted(record, lineage, head, [refused, *record.inputs[1:]])


def test_inputs_of_a_join_must_be_work_but_need_not_be_fresh(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    record = join_of(lineage, head, other, A)
    empty = listing(msgspec.structs.replace(record.inputs[0].contribution, tokens=0))
    assert "holds no work" in relisted(record, lineage, head, [empty, *record.inputs[1:]])
    wrong = msgspec.structs.replace(record.inputs[0], pieces=())
    assert "do not match their root" in relisted(record, lineage, head, [wrong, *record.inputs[1:]])


def test_an_amendment_replaces_what_was_listed_and_earns_nothing(lineage: Lineage) -> None:
    fork = branch(lineage, lineage.genesis, [A, B, C, D], 2)[-1]
    under_way = made_on(fork, D, 3, clip=1.0)
    first = add(lineage, fork, [under_way, made_on(fork, A, 3)], A)
    head = branch(lineage, first, [A, B, C], 6)[-1]
    theirs = add(lineage, fork, [made_on(fork, D, 3, clip=0.5)], D)
    other = branch(lineage, theirs, [D], 6)[-1]
    node = joined(lineage, head, other)
    amendment = node.listed[(D, 3)]
    assert (amendment.refusal, amendment.clip) == (AMENDED, 0.5)
    assert lineage.returned_share(node, (D, 3), fork.version) == 0.5
    assert node.tokens_total == head.tokens_total + 6 * 128
    assert lineage.listings(node)[(D, 3)] is amendment


def test_a_join_of_an_unknown_head_can_be_followed(lineage: Lineage) -> None:
    _, head, other = split(lineage)
    record = join_of(lineage, head, other, A)
    elsewhere = Lineage(RULES)
    for one in [*lineage.ancestors(head)][::-1]:
        if one.record is not None:
            assert judged(elsewhere, one.record) == ""
            elsewhere.add(one.record, one.digest)
    assert judged(elsewhere, record) == ""
    node = elsewhere.add(record, named(record))
    assert elsewhere.covered(node) == {one.digest for one in elsewhere.ancestors(node)}
    assert root("x") not in elsewhere.nodes
