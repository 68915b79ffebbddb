"""Vectors behind the core's actions: merging, following, refusing lies, undoing (rules 3 to 8)."""

import dataclasses

import numpy as np
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS
from dugnad.averaging.fragments import Group
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.outer import bits_of
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import (
    CORRECTIONS_KEPT,
    PAYLOADS_KEPT,
    FragmentRules,
    FragmentWorker,
    Progress,
    WorkError,
    check_contribution,
)
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    RULES,
    RUN,
    A,
    B,
    C,
    draft,
    root,
    work,
)

SIZE = 24
GENESIS = Lineage(RULES).genesis
ANCHOR = AnchorState.fresh(np.linspace(-1.0, 1.0, SIZE, dtype=np.float32))
RULES_OF_MERGING = FragmentRules(
    run=RUN,
    fragment=0,
    groups=(Group(0, 12, "matrix"), Group(12, SIZE, "embedding")),
    rule="mean",
    hand_in_codec="int8",
    commit_codec="int8",
    eta_bits=bits_of(0.7),
    mu_bits=bits_of(0.5),
)


def worker(me: PeerId) -> FragmentWorker:
    return FragmentWorker.start(RULES_OF_MERGING, me, GENESIS.digest, ANCHOR)


def lean_worker(me: PeerId) -> FragmentWorker:
    rules = dataclasses.replace(RULES_OF_MERGING, leanest_commit="int4")
    return FragmentWorker.start(rules, me, GENESIS.digest, ANCHOR)


def learned(step: float) -> Vector:
    made: Vector = ANCHOR.theta + np.float32(step) * np.arange(SIZE, dtype=np.float32)
    return made


def handed_in(one: FragmentWorker, seq: int, step: float = 0.01) -> fm.Contribution:
    action = ev.HandIn(seq, 0, GENESIS.digest)
    return one.hand_in(action, learned(step), Progress(8 * 16, 8, work(8), 12, True))


def merge_of(
    one: FragmentWorker, *keys: ev.Key, codec: str = ""
) -> tuple[ev.Merged, fm.CommitRecord, bytes]:
    """Merge, write the header, seal; the answer, the commit and its digest."""
    answer = one.merge(ev.Merge(GENESIS.digest, 1, tuple(sorted(keys))), codec)
    record = draft(
        GENESIS,
        answer.inputs,
        one.me,
        codec=answer.codec,
        payload_root=answer.payload_root,
        payload_bytes=answer.payload_bytes,
        theta_root=answer.theta_root,
        momentum_root=answer.momentum_root,
        eta_bits=RULES_OF_MERGING.eta_bits,
        mu_bits=RULES_OF_MERGING.mu_bits,
    )
    digest = fm.header_digest(record.header, RUN)
    one.sealed(digest, record.header)
    return answer, record, digest


def test_a_contribution_says_what_its_payload_is() -> None:
    one = worker(A)
    made = handed_in(one, 1)
    payload = one.inbox[(A, 1)].payload
    assert (made.peer, made.seq, made.base, made.tokens) == (A, 1, 0, 128)
    check_contribution(made, payload, SIZE)
    signed = fm.Contribution(
        **{f: getattr(made, f) for f in made.__struct_fields__} | {"signature": b"s" * 64}
    )
    one.signed_own(signed)
    assert one.inbox[(A, 1)].contribution.signature == b"s" * 64


def test_home_and_followers_hold_the_same_bits() -> None:
    home, follower = worker(A), worker(B)
    handed_in(home, 1)
    made = handed_in(follower, 1, -0.02)
    home.keep(made, work(8), follower.inbox[(B, 1)].payload)
    answer, record, digest = merge_of(home, (A, 1), (B, 1))
    assert [i.contribution.peer for i in answer.inputs] == [A, B]
    assert answer.bad == ()
    follower.advance(digest, record.header, home.commits[digest].payload)
    assert np.array_equal(home.states[digest].theta, follower.states[digest].theta)
    assert follower.states[digest].theta_root == record.header.theta_root
    assert follower.commits[digest] == home.commits[digest]


def test_merges_are_as_lean_as_their_run_allows() -> None:
    home, follower, older = lean_worker(A), lean_worker(B), worker(C)
    handed_in(home, 1)
    answer = home.merge(ev.Merge(GENESIS.digest, 1, ((A, 1),)), "int4")
    assert answer.codec == "int4"
    assert answer.payload_bytes == CODECS["int4"].encoded_size(SIZE)
    _, record, digest = merge_of(home, (A, 1), codec="int4")
    payload = home.commits[digest].payload
    follower.advance(digest, record.header, payload)
    assert np.array_equal(home.states[digest].theta, follower.states[digest].theta)
    with pytest.raises(WorkError, match="none of the run's commits"):
        older.advance(digest, record.header, payload)


def test_what_a_lean_merge_loses_waits_in_its_homes_residual() -> None:
    home = lean_worker(A)
    handed_in(home, 1)
    exact = CODECS["int8"].decode(home.inbox[(A, 1)].payload, SIZE)
    before = home.buffers.residual.copy()
    _, _, digest = merge_of(home, (A, 1), codec="int4")
    merged = CODECS["int4"].decode(home.commits[digest].payload, SIZE)
    assert not np.array_equal(merged, exact)
    home.adopt(digest, (), (digest,))
    assert np.allclose(home.buffers.residual - before, exact - merged, atol=1e-7)


def test_a_newcomer_installs_whole_anchors_that_match_the_roots_only() -> None:
    home, newcomer = worker(A), worker(B)
    handed_in(home, 1)
    _, record, digest = merge_of(home, (A, 1))
    state = home.states[digest]
    with pytest.raises(WorkError, match="do not match"):
        newcomer.install(digest, record.header, state.theta + np.float32(1), state.momentum)
    with pytest.raises(WorkError):
        newcomer.install(digest, record.header, state.theta * np.float32("nan"), state.momentum)
    assert digest not in newcomer.states
    newcomer.install(digest, record.header, state.theta, state.momentum)
    assert newcomer.states[digest].theta_root == state.theta_root


LIES = {
    "an unknown codec": ({"codec": "zip"}, True),
    "another size": ({"payload_bytes": 3}, False),
    "another payload": ({"payload_root": root("x")}, False),
    "other roots": ({"theta_root": root("x")}, True),
    "impossible rates": ({"eta_bits": bits_of(float("inf"))}, True),
    "a rate beyond 32 bits": ({"mu_bits": 1 << 40}, True),
    "an unknown parent": ({"parent": root("x")}, False),
}


@pytest.mark.parametrize(("changes", "lied"), LIES.values(), ids=LIES.keys())
def test_a_payload_that_is_not_what_its_header_says_changes_nothing(
    changes: dict[str, object], lied: bool
) -> None:
    home, follower = worker(A), worker(B)
    handed_in(home, 1)
    _, record, digest = merge_of(home, (A, 1))
    fields = {f: getattr(record.header, f) for f in record.header.__struct_fields__}
    header = fm.Header(**(fields | changes))
    with pytest.raises(WorkError) as caught:
        follower.advance(digest, header, home.commits[digest].payload)
    assert caught.value.lied == lied
    assert digest not in follower.states


def test_a_foreign_contribution_is_checked_against_its_record() -> None:
    home, other = worker(A), worker(B)
    made = handed_in(other, 1)
    payload = other.inbox[(B, 1)].payload
    spoiled = bytes([payload[0] ^ 1]) + payload[1:]
    for bad in (spoiled, payload[:-1], b""):
        with pytest.raises(WorkError):
            home.keep(made, work(8), bad)
    assert home.inbox == {}
    home.keep(made, work(8), payload)
    home.drop_payload((B, 1))
    assert home.inbox == {}


def test_a_number_that_is_not_finite_is_refused() -> None:
    home = worker(A)
    payload = np.full(SIZE, np.nan, np.float32).tobytes()
    made = handed_in(worker(B), 1)
    fields = {f: getattr(made, f) for f in made.__struct_fields__}
    with pytest.raises(WorkError):
        home.keep(fm.Contribution(**(fields | {"codec": "float32"})), work(8), payload)


def test_a_second_contribution_with_one_number_replaces_nothing() -> None:
    home, other, twin = worker(A), worker(B), worker(B)
    first, second = handed_in(other, 1), handed_in(twin, 1, 0.5)
    home.keep(first, work(8), other.inbox[(B, 1)].payload)
    with pytest.raises(WorkError, match="another contribution"):
        home.keep(second, work(8), twin.inbox[(B, 1)].payload)
    assert home.inbox[(B, 1)].contribution == first


def test_my_own_contribution_is_not_taken_from_others() -> None:
    home = worker(A)
    made = handed_in(home, 1)
    payload = home.inbox[(A, 1)].payload
    home.forget(1)
    with pytest.raises(WorkError, match="my own"):
        home.keep(made, work(8), payload)
    assert home.inbox == {}


def test_what_is_gone_is_named_and_the_rest_is_merged() -> None:
    home = worker(A)
    handed_in(home, 1)
    answer = home.merge(ev.Merge(GENESIS.digest, 1, ((A, 1), (B, 1))))
    assert [i.contribution.peer for i in answer.inputs] == [A]
    assert [key for key, _ in answer.bad] == [(B, 1)]
    nothing = home.merge(ev.Merge(GENESIS.digest, 1, ((B, 1),)))
    assert (nothing.inputs, [key for key, _ in nothing.bad]) == ((), [(B, 1)])


def test_only_the_merge_that_is_about_to_be_signed_can_be_sealed() -> None:
    home = worker(A)
    handed_in(home, 1)
    _, record, digest = merge_of(home, (A, 1))
    assert home.made_payload(record.header) is None
    with pytest.raises(WorkError, match="is gone"):
        home.sealed(digest, record.header)


def test_an_input_that_broke_while_it_lay_here_is_named_and_the_rest_is_merged() -> None:
    home, other = worker(A), worker(B)
    handed_in(home, 1)
    made = handed_in(other, 1)
    home.keep(made, work(8), other.inbox[(B, 1)].payload)
    alone = home.merge(ev.Merge(GENESIS.digest, 1, ((A, 1),)))
    for broken in (b"\xff" * made.payload_bytes, b""):
        home.inbox[(B, 1)] = dataclasses.replace(home.inbox[(B, 1)], payload=broken)
        answer = home.merge(ev.Merge(GENESIS.digest, 1, ((A, 1), (B, 1))))
        assert [key for key, _ in answer.bad] == [(B, 1)]
        assert answer.payload_root == alone.payload_root


@pytest.mark.parametrize("rule", ["mean", "radial", "centred"])
def test_squared_norms_are_known_before_the_merge_and_change_nothing(rule: str) -> None:
    home, other = worker(A), worker(B)
    home.rules = dataclasses.replace(RULES_OF_MERGING, rule=rule)
    handed_in(home, 1)
    made = handed_in(other, 1, -0.02)
    home.keep(made, work(8), other.inbox[(B, 1)].payload)
    action = ev.Merge(GENESIS.digest, 1, ((A, 1), (B, 1)))
    known = home.merge(action)
    home.inbox[(B, 1)] = dataclasses.replace(home.inbox[(B, 1)], squares=None)
    assert home.merge(action) == known


def total(one: FragmentWorker, theta: Vector) -> np.ndarray:
    """Residual and what is fresh in the learner."""
    buffers = one.buffers
    sums: np.ndarray = buffers.residual.astype(np.float64) + buffers.ref - theta
    return sums


def test_adopting_moves_the_learner_with_its_anchor_and_rounding_with_the_merge() -> None:
    home = worker(A)
    handed_in(home, 1)
    _, _, digest = merge_of(home, (A, 1))
    theta = learned(0.01)
    before = total(home, theta)
    theta = theta + home.adopt(digest, (), (digest,))
    after = total(home, theta)
    assert np.allclose(after - before, home.corrections[digest], atol=1e-6)
    theta = theta + home.adopt(GENESIS.digest, (digest,), ())
    assert np.allclose(total(home, theta), before, atol=1e-6)
    theta = theta + home.adopt(digest, (), (digest,))
    home.adopt(digest, (), (digest,))  # told twice, counted once
    assert np.allclose(total(home, theta), after, atol=1e-6)


def test_undoing_a_merge_whose_rounding_is_forgotten_does_not_fail() -> None:
    # found by the simulator: nine merges of one's own and a switch of lineage
    home = worker(A)
    digests = []
    for seq in range(1, CORRECTIONS_KEPT + 3):
        handed_in(home, seq)
        digests.append(merge_of(home, (A, seq))[2])
        home.adopt(digests[-1], (), (digests[-1],))
    assert len(home.corrections) == CORRECTIONS_KEPT
    handed_in(home, 99)
    merge_of(home, (A, 99))
    home.adopt(GENESIS.digest, tuple(reversed(digests)), ())
    assert home.applied <= home.corrections.keys()


def test_rounding_is_let_go_once_its_merge_is_settled() -> None:
    home = worker(A)
    handed_in(home, 1)
    _, _, mine = merge_of(home, (A, 1))
    home.adopt(mine, (), (mine,))
    for number in range(1, CORRECTIONS_KEPT):
        later = root(f"commit {number}")
        home.states[later] = home.states[mine]
        home.adopt(later, (), (later,))
        assert mine in home.corrections
        assert mine in home.applied
    home.adopt(mine, (), (root("one too many"),))
    assert home.corrections == {}
    assert home.applied == set()


def test_rounding_of_a_merge_that_was_undone_waits_for_its_return() -> None:
    home = worker(A)
    handed_in(home, 1)
    _, _, mine = merge_of(home, (A, 1))
    home.adopt(mine, (), (mine,))
    before = home.buffers.residual.copy()
    home.adopt(GENESIS.digest, (mine,), ())
    others = tuple(root(f"commit {number}") for number in range(CORRECTIONS_KEPT + 2))
    home.adopt(GENESIS.digest, (), others)
    assert mine in home.corrections
    home.adopt(mine, others[::-1], (mine,))
    np.testing.assert_allclose(home.buffers.residual, before, atol=1e-7)


def test_settling_gives_a_share_back_and_can_be_changed() -> None:
    one = worker(A)
    made = handed_in(one, 1)
    vector = CODECS[made.codec].decode(one.inbox[(A, 1)].payload, SIZE)
    before = one.buffers.residual.copy()
    for share in (0.25, 1.0, 0.0, 0.5):
        one.settle(1, share)
        expected = before + np.float32(share) * vector
        assert np.allclose(one.buffers.residual, expected, atol=1e-6)
    one.forget(1)
    assert one.inbox == {}


def test_payloads_and_anchors_are_kept_in_bounded_numbers() -> None:
    home = worker(A)
    for seq in range(1, PAYLOADS_KEPT + 4):
        handed_in(home, seq)
        _, _, digest = merge_of(home, (A, seq))
        home.drop_state(digest)
    assert len(home.commits) == PAYLOADS_KEPT
    assert set(home.states) == {GENESIS.digest}
    assert dataclasses.is_dataclass(home)
