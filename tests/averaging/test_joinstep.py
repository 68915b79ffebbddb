"""The numbers of a join: a share of the way between two anchors, the same bits for everybody."""

import numpy as np
import pytest

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import COMMIT_CODECS
from dugnad.averaging.events import Join
from dugnad.averaging.formats import NO_DIGEST, Header, header_digest
from dugnad.averaging.join import ETA_BITS, JOIN, MU_BITS
from dugnad.averaging.joinstep import join_states, shift
from dugnad.averaging.outer import OuterError, bits_of
from dugnad.averaging.tree import LEAF_PARAMS, Vector
from dugnad.averaging.worker import FragmentWorker, WorkError
from dugnad.dht.ids import PeerId

from .exchange_makers import RUN, A, contribution, listing  # noqa: TID252  a helper of these tests
from .test_worker import RULES_OF_MERGING, SIZE  # noqa: TID252  the same worker

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled

FLOAT16, FLOAT32 = COMMIT_CODECS["float16"], COMMIT_CODECS["float32"]


def anchor(seed: int, size: int = 64) -> AnchorState:
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(size).astype(np.float32)
    return AnchorState.of(theta, rng.standard_normal(size).astype(np.float32))


def test_a_join_is_the_weighted_average_and_leaves_the_momentum() -> None:
    one, two = anchor(1), anchor(2)
    made = join_states(one, two, np.float32(0.25), FLOAT32)
    wanted = 0.75 * one.theta.astype(np.float64) + 0.25 * two.theta
    assert np.abs(made.state.theta - wanted).max() < 1e-6
    assert made.state.momentum_root == one.momentum_root
    assert made.state.momentum is one.momentum


def test_a_share_of_nothing_changes_nothing() -> None:
    one = anchor(1)
    assert join_states(one, anchor(2), np.float32(0.0), FLOAT16).state.theta_root == one.theta_root


@pytest.mark.parametrize("codec", [FLOAT16, FLOAT32], ids=lambda one: one.name)
def test_whoever_decodes_the_payload_gets_the_same_bits(codec: object) -> None:
    size = LEAF_PARAMS + 100
    one, two = anchor(1, size), anchor(2, size)
    made = join_states(one, two, np.float32(0.3), codec)  # type: ignore[arg-type]
    found = shift(one, made.payload, codec)  # type: ignore[arg-type]
    assert (found.theta_root, found.momentum_root) == (
        made.state.theta_root,
        made.state.momentum_root,
    )
    assert AnchorState.of(found.theta, found.momentum).theta_root == found.theta_root
    assert len(made.leaves) == 2


def test_anchors_that_are_no_numbers_any_more_are_refused() -> None:
    far = AnchorState.fresh(np.full(8, 3e38, np.float32))
    payload = np.full(8, -3e38, "<f4").tobytes()
    with pytest.raises(OuterError):
        shift(far, payload, FLOAT32)


# -- the worker ------------------------------------------------------------------------------------


def vector(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def worker_at(theta: Vector, digest: bytes = b"a" * 32) -> FragmentWorker:
    return FragmentWorker.start(RULES_OF_MERGING, A, digest, AnchorState.fresh(theta))


INPUTS = (listing(contribution(PeerId(b"p" * 32), 1, 0)),)


def header_of(made: object, **changes: object) -> Header:
    fields = {
        "format": 1,
        "run": RUN,
        "kind": JOIN,
        "fragment": 0,
        "version": 8,
        "parent": b"a" * 32,
        "home": A,
        "boot": 0,
        "time_ms": 1,
        "members_root": NO_DIGEST,
        "inputs_root": NO_DIGEST,
        "inputs_count": 1,
        "tokens_total": 1,
        "eta_bits": ETA_BITS,
        "mu_bits": MU_BITS,
        "seqs_root": NO_DIGEST,
        **{
            name: getattr(made, name)
            for name in ("codec", "payload_root", "payload_bytes", "theta_root", "momentum_root")
        },
    }
    return Header(**(fields | changes))


def test_a_worker_joins_what_it_holds_and_another_follows_by_the_payload() -> None:
    home, other = worker_at(vector(1)), AnchorState.fresh(vector(2))
    home.states[b"b" * 32] = other
    made = home.join(Join(b"a" * 32, b"b" * 32, bits_of(0.5), INPUTS))
    assert (made.other, made.alpha_bits, made.inputs) == (b"b" * 32, bits_of(0.5), INPUTS)
    assert made.codec == "float16"
    header = header_of(made)
    digest = header_digest(header, RUN)
    payload = home.made_payload(header)
    assert payload is not None
    home.sealed(digest, header)
    assert digest not in home.corrections  # nobody's rounding is in it
    follower = worker_at(vector(1))
    follower.advance(digest, header, payload)
    assert follower.states[digest].theta_root == home.states[digest].theta_root
    average = (vector(1).astype(np.float64) + vector(2)) / 2
    assert np.abs(follower.states[digest].theta - average).max() < 2e-3


def test_a_join_without_the_other_sides_anchors_fails_and_says_so() -> None:
    made = worker_at(vector(1)).join(Join(b"a" * 32, b"b" * 32, bits_of(0.5), INPUTS))
    assert (made.inputs, made.other) == ((), b"b" * 32)


def test_a_join_that_leads_elsewhere_than_it_says_is_a_lie() -> None:
    home = worker_at(vector(1))
    home.states[b"b" * 32] = AnchorState.fresh(vector(2))
    made = home.join(Join(b"a" * 32, b"b" * 32, bits_of(0.5), INPUTS))
    header = header_of(made, theta_root=b"x" * 32)
    payload = home.made_payload(header)
    assert payload is not None
    with pytest.raises(WorkError) as caught:
        worker_at(vector(1)).advance(b"d" * 32, header, payload)
    assert caught.value.lied
