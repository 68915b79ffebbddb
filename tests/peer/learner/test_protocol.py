"""The wire between daemon and learner: both ways, bounded, and refused when malformed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.peer.learner.protocol import (
    EVALUATE_SEQUENCES_MAX,
    FRAME_BYTES_MAX,
    PROVE_CHAINS_MAX,
    PROVE_SEQUENCES_MAX,
    WORK_SEQUENCES_MAX,
    CopyOut,
    Evaluate,
    FrameReader,
    Piece,
    ProtocolError,
    Prove,
    Sample,
    SetCpuShare,
    Step,
    ToLearner,
    Work,
    pack,
    unpack_from_learner,
    unpack_to_learner,
)

MESSAGES: list[ToLearner] = [
    Work(1, 2, 3, [4, 5], 6),
    CopyOut(1, 2),
    Evaluate(3, [1]),
    Sample(4, b"\xff", 5, 6),
]
STEP = Step(4, 8, 2.5, 0.1, (Piece(1, 2, 3, 4),), 5, 1e-3, 8)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_come_out_whole_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(pack(message) for message in MESSAGES)
    reader = FrameReader()
    bodies: list[bytes] = []
    for cut in cuts:
        bodies += reader.feed(stream[:cut])
        stream = stream[cut:]
    bodies += reader.feed(stream)
    assert [unpack_to_learner(body) for body in bodies] == MESSAGES


def test_reports_survive_the_wire() -> None:
    (body,) = FrameReader().feed(pack(STEP))
    assert unpack_from_learner(body) == STEP


def test_an_oversized_frame_is_refused_before_it_arrives() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        FrameReader().feed((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "no"})])
def test_malformed_bodies_are_refused_on_both_sides(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="the daemon sent"):
        unpack_to_learner(body)
    with pytest.raises(ProtocolError, match="the learner sent"):
        unpack_from_learner(body)


def test_every_message_has_its_bounds() -> None:
    with pytest.raises(ValueError, match="sequences in one Work"):
        Work(0, 0, 0, [0] * (WORK_SEQUENCES_MAX + 1), 0)
    with pytest.raises(ValueError, match="evaluate"):
        Evaluate(0, [0] * (EVALUATE_SEQUENCES_MAX + 1))
    with pytest.raises(ValueError, match="length"):
        Sample(0, b"", 0, 0)
    for chains in ([], [[1, 2]] * (PROVE_CHAINS_MAX + 1), [[0] * (PROVE_SEQUENCES_MAX + 2)]):
        with pytest.raises(ValueError, match="chains"):
            Prove(0, chains, 2)
    with pytest.raises(ValueError, match="equally many"):
        Prove(0, [[1, 2, 3]], 2)
    with pytest.raises(ValueError, match="cpu_share"):
        SetCpuShare(0.0)
