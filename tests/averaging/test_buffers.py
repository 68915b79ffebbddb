"""Buffers of a fragment: progress is in one place at a time, anchors are the same bits anywhere."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.buffers import (
    HAND_INS_BEFORE_BOUND,
    RESIDUAL_BOUND,
    RETAINED_MAX,
    UNSENT_SHARE,
    AnchorState,
    BuffersError,
    FragmentBuffers,
)
from dugnad.averaging.codecs import CODECS, CodecError, LeafCodec, Octets, leaf_bounds
from dugnad.averaging.fragments import EMBEDDING, MATRIX, Group
from dugnad.averaging.merge import MergeInput, merge
from dugnad.averaging.outer import OuterError, OuterState, Rates, bits_of, step
from dugnad.averaging.tree import LEAF_PARAMS, Vector, array_root, root

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled

INT8 = CODECS["int8"]
ETA, MU = bits_of(0.7), bits_of(0.5)


def noise(n: int, seed: int, size: float = 1.0) -> Vector:
    return (np.random.default_rng(seed).standard_normal(n) * size).astype(np.float32)


def integers(n: int, seed: int) -> Vector:
    """Integers in [-512, 512) by a hash: the same on every machine."""
    mixed = (np.arange(n, dtype=np.uint32) + np.uint32(seed * n + 1)) * np.uint32(2_654_435_761)
    return (((mixed >> np.uint32(16)) & np.uint32(1023)).astype(np.int64) - 512).astype(np.float32)


@dataclass
class Learner:
    """A learner with its books: all progress made, and what of it lineages listed."""

    buffers: FragmentBuffers
    theta: Vector
    made: np.ndarray = field(init=False)
    listed: dict[int, float] = field(default_factory=dict)
    sent: dict[int, Vector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made = np.zeros(self.theta.size)

    def learn(self, change: Vector) -> None:
        before = self.theta
        self.theta = before - change
        self.made += before.astype(np.float64) - self.theta

    def hand_in(self, seq: int, codec: str) -> None:
        found = self.buffers.hand_in(seq, self.theta, CODECS[codec])
        self.sent[seq] = CODECS[codec].decode(found.payload, self.theta.size)

    def adopt(self, state: AnchorState) -> None:
        self.theta = self.theta + self.buffers.adopt(state)

    def balance(self) -> float:
        """Return the largest |G - M - L|, beside the size of all numbers involved."""
        held = self.buffers.residual.astype(np.float64)
        held += self.buffers.ref.astype(np.float64) - self.theta
        for seq, sent in self.sent.items():
            kept = self.buffers.retained.get(seq)
            returned = kept.returned if kept else 1.0 - self.listed[seq]
            held += (1.0 - returned) * sent  # in flight or listed
        size = max(1.0, np.abs(self.made).max(), np.abs(self.theta).max())
        return float(np.abs(self.made - held).max() / size)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), st.integers(0, 99), st.sampled_from([1e-3, 1.0])),
        st.tuples(st.just("hand in"), st.sampled_from(sorted(CODECS)), st.just(0.0)),
        st.tuples(st.just("settle"), st.integers(0, 9), st.floats(0.0, 1.0)),
        st.tuples(st.just("forget"), st.integers(0, 9), st.just(0.0)),
        st.tuples(st.just("adopt"), st.integers(0, 99), st.sampled_from([0.1, 1.0])),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(ACTIONS)
def test_progress_is_conserved_whatever_happens(
    actions: list[tuple[str, int | str, float]],
) -> None:
    """G = M + L (schedules.md section 1), for any order of events and any anchors."""
    anchor = AnchorState.fresh(noise(700, 1))
    learner = Learner(FragmentBuffers(anchor), anchor.theta.copy())
    for number, (action, what, size) in enumerate(actions):
        held = sorted(learner.buffers.retained)
        if action == "learn" and isinstance(what, int):
            learner.learn(noise(700, what, size))
        elif action == "hand in" and isinstance(what, str):
            learner.hand_in(number, what)
        elif action == "adopt" and isinstance(what, int):
            learner.adopt(AnchorState.fresh(noise(700, what, size)))
        elif held and isinstance(what, int):
            seq = held[what % len(held)]
            if action == "settle":
                learner.buffers.settle(seq, size)
            else:
                learner.listed[seq] = 1.0 - learner.buffers.retained[seq].returned
                learner.buffers.forget(seq)
        if learner.buffers.dropped_norm == 0.0:
            assert learner.balance() < 1e-5


def test_a_hand_in_is_what_the_learner_did_since_the_last() -> None:
    theta = noise(3000, 0)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    first = buffers.hand_in(1, theta - np.float32(1.0), CODECS["float32"])
    second = buffers.hand_in(2, theta - np.float32(3.0), CODECS["float32"])
    for found, due in ((first, 1.0), (second, 2.0)):
        np.testing.assert_allclose(CODECS["float32"].decode(found.payload, 3000), due, rtol=1e-6)
        assert found.progress_norm == pytest.approx(due * np.sqrt(3000), rel=1e-6)
        assert found.residual_norm == 0.0
        assert found.dropped_norm == 0.0


def test_what_the_codec_loses_waits_in_the_residual_and_comes_next() -> None:
    n = LEAF_PARAMS + 5
    theta = noise(n, 0)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    after = theta - noise(n, 1, 1e-3)
    sent = INT8.decode(buffers.hand_in(1, after, INT8).payload, n)
    lost = (theta - after) - sent
    np.testing.assert_array_equal(buffers.residual, lost)
    assert lost.any()
    again = CODECS["float32"].decode(buffers.hand_in(2, after, CODECS["float32"]).payload, n)
    np.testing.assert_array_equal(again, lost)
    assert not buffers.residual.any()


def test_a_hand_in_names_its_payload_by_leaves_and_root() -> None:
    n = LEAF_PARAMS + 5
    buffers = FragmentBuffers(AnchorState.fresh(noise(n, 0)))
    found = buffers.hand_in(1, noise(n, 1), INT8)
    assert len(found.leaf_hashes) == 2
    assert found.payload_root == root(found.payload, leaf_bounds(INT8, n))


def test_the_learners_array_may_change_after_a_hand_in() -> None:
    theta = noise(10, 0)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    learner = theta.copy()
    buffers.hand_in(1, learner, INT8)
    learner += 1.0
    np.testing.assert_array_equal(buffers.ref, theta)


def test_an_array_that_nobody_can_write_to_becomes_the_reference_itself() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(noise(10, 0)))
    learner = noise(10, 1)
    learner.flags.writeable = False
    buffers.hand_in(1, learner, INT8)
    assert buffers.ref is learner


def test_without_outer_momentum_a_merge_neither_copies_nor_hashes_it() -> None:
    state = AnchorState.of(noise(50, 0), noise(50, 1))
    payload = INT8.encode(noise(50, 2))
    after = FragmentBuffers.advance(state, payload, INT8, eta_bits=ETA, mu_bits=bits_of(0.0))
    assert after.momentum is state.momentum
    assert after.momentum_root == state.momentum_root
    assert after.theta_root == array_root(after.theta) != state.theta_root


def test_settling_returns_a_share_and_can_be_undone() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(np.zeros(4, np.float32)))
    buffers.hand_in(1, np.full(4, -8.0, np.float32), CODECS["float32"])
    for share in (0.25, 0.25, 1.0, 0.0, 0.5):
        buffers.settle(1, share)
        np.testing.assert_array_equal(buffers.residual, np.float32(8.0 * share))
    buffers.forget(1)
    buffers.forget(1)
    with pytest.raises(BuffersError, match="not retained"):
        buffers.settle(1, 1.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_none_and_all(share: float) -> None:
    buffers = FragmentBuffers(AnchorState.fresh(np.zeros(4, np.float32)))
    buffers.hand_in(1, np.ones(4, np.float32), INT8)
    with pytest.raises(BuffersError, match="share"):
        buffers.settle(1, share)


def test_adopting_keeps_what_was_learned_since_the_hand_in_on_top() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(np.zeros(4, np.float32)))
    theta = np.full(4, -1.0, np.float32)
    buffers.hand_in(1, theta, INT8)
    theta = theta - np.float32(0.25)
    theta = theta + buffers.adopt(AnchorState.fresh(np.full(4, -5.0, np.float32)))
    np.testing.assert_array_equal(theta, np.float32(-5.25))
    np.testing.assert_array_equal(buffers.ref - theta, np.float32(0.25))


def test_after_a_sparse_hand_in_a_part_of_what_waits_stays_in_the_learners_parameters() -> None:
    anchor, fresh = noise(5000, 0), np.float32(0.25)
    buffers = FragmentBuffers(AnchorState.fresh(noise(5000, 1)))
    theta = noise(5000, 2)
    buffers.hand_in(1, theta, CODECS["topk-1.56"])
    theta = theta - fresh + buffers.adopt(AnchorState.fresh(anchor))
    due = anchor - UNSENT_SHARE * buffers.residual - fresh
    np.testing.assert_allclose(theta, due, atol=1e-5)
    np.testing.assert_allclose(buffers.ref - theta, fresh, atol=1e-5)
    buffers.hand_in(2, theta, INT8)
    theta = theta + buffers.adopt(AnchorState.fresh(anchor))
    assert buffers.ref is buffers.anchor.theta


def test_sparse_hand_ins_do_not_train_the_same_way_again_until_they_overshoot() -> None:
    """Two peers go a tenth of the way to one goal each round, which sparse hand-ins carry in 64."""
    goal, codec = noise(4096, 0), CODECS["topk-1.56"]
    anchor = AnchorState.fresh(np.zeros(4096, np.float32))
    peers = [FragmentBuffers(anchor) for _ in range(2)]
    thetas = [anchor.theta.copy() for _ in peers]
    for number in range(160):
        merged = np.zeros(4096, np.float32)
        for peer, buffers in enumerate(peers):
            thetas[peer] = thetas[peer] - np.float32(0.1) * (thetas[peer] - goal)
            made = buffers.hand_in(number, thetas[peer], codec)
            buffers.forget(number)
            merged += codec.decode(made.payload, 4096) / np.float32(len(peers))
        anchor = AnchorState.fresh(anchor.theta - merged)
        for peer, buffers in enumerate(peers):
            thetas[peer] = thetas[peer] + buffers.adopt(anchor)
    assert np.linalg.norm(anchor.theta - goal) < 0.6 * np.linalg.norm(goal)


def test_refused_hand_ins_leave_the_buffers_as_they_were() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(noise(100, 0)))
    buffers.hand_in(5, noise(100, 1), INT8)
    before = buffers.export()
    broken = noise(100, 2)
    broken[3] = np.nan
    for seq, theta, reason in (
        (5, noise(100, 2), "seq 5 after 5"),
        (6, broken, "not finite"),
        (6, noise(99, 2), "99"),
        (6, noise(100, 2).astype(np.float64), "float64"),
    ):
        with pytest.raises(BuffersError, match=reason):
            buffers.hand_in(seq, theta, INT8)  # type: ignore[arg-type]
    after = buffers.export()
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])


def test_retained_contributions_are_bounded() -> None:
    theta = noise(10, 0)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    for seq in range(RETAINED_MAX):
        buffers.hand_in(seq, theta, INT8)
    with pytest.raises(BuffersError, match="waiting"):
        buffers.hand_in(RETAINED_MAX, theta, INT8)
    buffers.forget(0)
    buffers.hand_in(RETAINED_MAX, theta, INT8)


class NothingCodec(LeafCodec):
    """Sends nothing at all: the residual grows by all progress."""

    name = "int8"  # what is retained is never decoded here

    def leaf_size(self, n: int) -> int:
        return 1

    def encode_leaf(self, x: Vector, out: Octets, scratch: Vector) -> None:
        out[:] = 0

    def decode_leaf(self, data: Octets, out: Vector, scratch: Vector) -> None:
        out[:] = 0.0


def test_the_residual_is_bounded_and_what_is_dropped_is_counted() -> None:
    theta = np.zeros(100, np.float32)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    dropped = 0.0
    for seq in range(int(RESIDUAL_BOUND) + 10):
        theta = theta - np.float32(1.0)
        found = buffers.hand_in(seq, theta, NothingCodec())
        buffers.forget(seq)
        dropped += found.dropped_norm
        assert found.residual_norm <= RESIDUAL_BOUND * 10.0 * (1 + 1e-6)
        assert (found.dropped_norm > 0.0) == (seq >= RESIDUAL_BOUND)
    assert dropped == pytest.approx(100.0, rel=1e-3)
    assert buffers.dropped_norm == pytest.approx(dropped)


def test_hand_ins_without_progress_do_not_tighten_the_bound() -> None:
    theta = np.zeros(100, np.float32)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    buffers.add_residual(np.full(100, 0.3, np.float32))
    for seq in range(HAND_INS_BEFORE_BOUND + 2):
        assert buffers.hand_in(seq, theta, NothingCodec()).dropped_norm == 0.0
    assert buffers.residual.sum() == pytest.approx(30.0)


def test_a_home_returns_its_rounding_to_its_residual() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(np.zeros(3, np.float32)))
    buffers.add_residual(np.array([1.0, 2.0, 3.0], np.float32))
    np.testing.assert_array_equal(buffers.residual, [1.0, 2.0, 3.0])
    with pytest.raises(BuffersError, match="not finite"):
        buffers.add_residual(np.array([1.0, np.inf, 3.0], np.float32))
    with pytest.raises(BuffersError, match="shape"):
        buffers.add_residual(np.zeros(2, np.float32))
    np.testing.assert_array_equal(buffers.residual, [1.0, 2.0, 3.0])
    buffers.take_residual(np.array([1.0, 2.0, 3.0], np.float32))
    with pytest.raises(BuffersError, match="not finite"):
        buffers.take_residual(np.array([1.0, np.nan, 3.0], np.float32))
    assert not buffers.residual.any()


@pytest.mark.parametrize("name", CODECS)
def test_advancing_is_the_outer_step_with_roots(name: str) -> None:
    n = LEAF_PARAMS + 1030
    state = AnchorState.of(noise(n, 0), noise(n, 1))
    payload = CODECS[name].encode(noise(n, 2))
    found = FragmentBuffers.advance(state, payload, CODECS[name], eta_bits=ETA, mu_bits=MU)
    plain = step(
        OuterState(state.theta, state.momentum),
        CODECS[name].decode(payload, n),
        Rates.of_bits(eta_bits=ETA, mu_bits=MU),
    )
    assert found.theta.tobytes() == plain.theta.tobytes()
    assert found.momentum.tobytes() == plain.momentum.tobytes()
    assert found.theta_root == array_root(plain.theta)
    assert found.momentum_root == array_root(plain.momentum)
    assert found.theta_leaves == AnchorState.of(plain.theta, plain.momentum).theta_leaves


def test_foreign_payloads_and_rates_cannot_advance_an_anchor() -> None:
    state = AnchorState.fresh(noise(100, 0))
    payload = INT8.encode(noise(100, 1))
    bad = payload[:2] + b"\xff\xff" + payload[4:]
    for wrong in (payload[:-1], bad):
        with pytest.raises(CodecError):
            FragmentBuffers.advance(state, wrong, INT8, eta_bits=ETA, mu_bits=MU)
    with pytest.raises(OuterError):
        FragmentBuffers.advance(state, payload, INT8, eta_bits=bits_of(9.0), mu_bits=MU)


def test_anchors_are_read_only_and_judged() -> None:
    theta = noise(10, 0)
    state = AnchorState.fresh(theta)
    theta[0] = 5.0
    assert state.theta[0] != 5.0
    with pytest.raises(ValueError, match="read-only"):
        state.momentum[0] = 1.0
    for bad in (np.array([np.nan], np.float32), np.zeros(1), np.zeros((1, 1), np.float32)):
        with pytest.raises(BuffersError, match="finite"):
            AnchorState.fresh(bad)  # type: ignore[arg-type]
    with pytest.raises(BuffersError, match="with 2 momenta"):
        AnchorState.of(np.zeros(1, np.float32), np.zeros(2, np.float32))


def test_an_anchor_of_another_size_is_refused() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(noise(10, 0)))
    with pytest.raises(BuffersError, match="11 parameters for 10"):
        buffers.adopt(AnchorState.fresh(noise(11, 0)))


def test_buffers_come_back_from_a_snapshot_and_go_on_alike() -> None:
    n = 2000
    buffers = FragmentBuffers(AnchorState.fresh(noise(n, 0)))
    for seq, codec in enumerate(("int8", "float16", "topk-6.25")):
        buffers.hand_in(seq, noise(n, seq + 1), CODECS[codec])
    buffers.settle(0, 0.5)
    copy = FragmentBuffers.restore(buffers.export())
    assert copy.anchor.theta_root == buffers.anchor.theta_root
    following = AnchorState.fresh(noise(n, 8))
    np.testing.assert_array_equal(copy.adopt(following), buffers.adopt(following))
    for one in (buffers, copy):
        one.settle(0, 1.0)
        one.settle(1, 0.25)
    assert copy.hand_in(3, noise(n, 9), INT8) == buffers.hand_in(3, noise(n, 9), INT8)
    np.testing.assert_array_equal(copy.residual, buffers.residual)


def test_a_cut_snapshot_is_refused() -> None:
    buffers = FragmentBuffers(AnchorState.fresh(noise(100, 0)))
    buffers.hand_in(3, noise(100, 1), INT8)
    whole = buffers.export()
    for name in whole:
        if name != "retained/3/int8":
            with pytest.raises(BuffersError):
                FragmentBuffers.restore({k: v for k, v in whole.items() if k != name})
    changes: tuple[tuple[str, np.ndarray], ...] = (
        ("ref", np.zeros(99, np.float32)),
        ("residual", np.full(100, np.nan, np.float32)),
        ("theta", np.zeros(100)),
        ("last_seq", np.zeros(0, np.int64)),
        ("retained/3/int8", np.zeros(9, np.uint8)),
        ("retained/3/zip", np.zeros(9, np.uint8)),
        ("retained/x/int8", np.zeros(9, np.uint8)),
    )
    for name, array in changes:
        with pytest.raises(BuffersError):
            FragmentBuffers.restore({**whole, name: array})


GOLDEN_SIZE = LEAF_PARAMS + 2500
GOLDEN = {
    "mean": (
        "0f137687dd5247669aecd9714cf14b51c2d2995713676385c263101ec868b5e4",
        "f94ad3a9013c3cd3ccf195c9cb2bf0dd1c4f331774e197b87b4aa1f944c49454",
    ),
    "radial": (
        "65229ab2eb1189582e999c87eee022bdd2ccdb5e74b2ecf448976527d5932878",
        "7ac29da89c16fb5a45313460bfc2db0966e2cc099c2206307f92c5f1c8a438d8",
    ),
}


def golden_run(rule: str) -> AnchorState:
    """Five versions of three peers with int8, from deltas made of integers."""
    n = GOLDEN_SIZE
    groups = [Group(0, 2000, EMBEDDING), Group(2000, n, MATRIX)]
    state = AnchorState.fresh(integers(n, 0) * np.float32(2.0**-8))
    peers = [FragmentBuffers(state) for _ in range(3)]
    thetas = [state.theta.copy() for _ in peers]
    for version in range(1, 6):
        inputs = []
        for i, peer in enumerate(peers):
            delta = integers(n, 10 * version + i) * np.float32(2.0 ** -(12 + i))
            thetas[i] = thetas[i] - delta
            payload = peer.hand_in(version, thetas[i], INT8).payload
            vector = INT8.decode(payload, n)
            inputs.append(MergeInput(bytes([i]) * 32, version, 1000 * (i + 1), 10 + i, vector))
        merged = merge(inputs, groups, rule=rule)
        payload = INT8.encode(merged.vector)
        state = FragmentBuffers.advance(state, payload, INT8, eta_bits=ETA, mu_bits=MU)
        for i, peer in enumerate(peers):
            peer.settle(version, 1.0 - merged.clips[i])
            thetas[i] = thetas[i] + peer.adopt(state)
    return state


@pytest.mark.parametrize("rule", GOLDEN)
def test_the_golden_run_has_the_same_roots_on_every_machine(rule: str) -> None:
    """If these roots change, the exchange changed: peers of an older version cannot follow.

    They were the same under SSE2, AVX2 and AVX-512 code of numpy and three BLAS kernels.
    """
    state = golden_run(rule)
    assert (state.theta_root.hex(), state.momentum_root.hex()) == GOLDEN[rule]


def test_a_draft_that_is_taken_back_and_made_again_holds_all_that_was_learned() -> None:
    rng = np.random.default_rng(4)
    theta = rng.standard_normal(300).astype(np.float32)
    once, drafted = (FragmentBuffers(AnchorState.fresh(theta)) for _ in range(2))
    learner = theta.copy()
    for _ in range(3):
        learner = learner - np.float32(0.01) * rng.standard_normal(300).astype(np.float32)
        if drafted.retained:
            drafted.take_back(7)
        drafted.hand_in(7, learner, CODECS["topk-1.56"], final=False)
    drafted.take_back(7)
    assert not drafted.retained
    assert np.allclose(drafted.residual, theta - learner, atol=1e-6), "none is lost, none twice"
    last = drafted.hand_in(7, learner, CODECS["float32"])
    whole = once.hand_in(7, learner, CODECS["float32"])
    sent = np.frombuffer(last.payload, np.float32)
    assert np.allclose(sent, np.frombuffer(whole.payload, np.float32), atol=1e-6)
    assert drafted.typical_progress() >= once.typical_progress() > 0.0
    assert (once.made, drafted.made) == (1, 4)


def test_only_the_newest_hand_in_can_be_taken_back() -> None:
    theta = np.ones(64, np.float32)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    for seq in (1, 2):
        buffers.hand_in(seq, theta * (1 - seq / 10), CODECS["int8"])
    for seq in (1, 3):
        with pytest.raises(BuffersError, match="not the newest"):
            buffers.take_back(seq)
