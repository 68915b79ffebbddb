"""What of a captured training state counts when it is taken up again, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.formats import UnitPiece
from dugnad.averaging.fragments import build_table
from dugnad.averaging.tree import Vector
from dugnad.dht.ids import PeerId, RunId
from dugnad.peer.context import (
    Context,
    Mark,
    Owner,
    Work,
    begin,
    file_bytes_max,
    packed,
    unpacked,
)
from dugnad.peer.contextkeeper import (
    STALL_SHARE,
    WRITE_BYTES_PER_S,
    drafts_written,
    interval,
    newest,
    no_room,
)
from dugnad.peer.learner.protocol import InnerState
from dugnad.peer.limits import Limits
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.progress import DoneStep
from dugnad.peer.savefile import SaveFault, SaveFolder, read_tensors

CONFIG = ModelConfig(dim=16, layers=1, heads=2, hidden=24, context=16)
TABLE = build_table(CONFIG.tensor_specs(), 2)
OWNER = Owner(RunId(b"r" * 32), PeerId(b"p" * 32), TABLE)
MARKS = (Mark(3, 4, b"a" * 32), Mark(0, 0, b"b" * 32))
HANDED_IN = (Mark(4, 5, b"a" * 32), MARKS[1])
INNER = InnerState(9, 1000, b"generator", "cpu", "float32", 4)


def vectors(seed: int, size: int = TABLE.total) -> Vector:
    made: Vector = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return made


def parts(flat: Vector) -> tuple[Vector, ...]:
    return tuple(
        flat[start : start + size] for start, size in zip(TABLE.offsets, TABLE.sizes, strict=True)
    )


def context(**changes: object) -> Context:
    ref = vectors(1)
    made = Context(
        step=10,
        at_ms=123,
        inner=INNER,
        marks=MARKS,
        work=Work((DoneStep(9, (UnitPiece(0, 1, 0, 4),)), DoneStep(10, ())), (8, 10)),
        refs=parts(ref),
        theta=ref - np.float32(0.01) * vectors(2),
        moments=(vectors(3), np.abs(vectors(4))),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # a table of mixed types


def test_where_nothing_happened_the_parameters_are_the_captured_ones_bit_for_bit() -> None:
    known = context()
    beginning = begin(known, TABLE, known.refs, MARKS)
    assert beginning.theta.tobytes() == known.theta.tobytes()
    assert beginning.counts == (True, True)
    copies = [ref.copy() for ref in known.refs]
    assert begin(known, TABLE, copies, MARKS).theta.tobytes() == known.theta.tobytes()


def test_what_was_handed_in_since_the_capture_is_not_counted_twice() -> None:
    known = context()
    handed_in = vectors(5, TABLE.sizes[0])
    beginning = begin(known, TABLE, (handed_in, known.refs[1]), HANDED_IN)
    first, second = parts(beginning.theta)
    assert beginning.counts == (False, True)
    assert np.array_equal(first, handed_in), "its progress went with contribution 4"
    assert np.array_equal(second, parts(known.theta)[1])


@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_progress_is_conserved_whatever_was_adopted_or_handed_in(
    seed: int, adopted: bool, handed_in: bool
) -> None:
    known = context()
    refs = parts(vectors(seed)) if adopted else known.refs
    marks = HANDED_IN if handed_in else MARKS
    progress = [ref - theta for ref, theta in zip(known.refs, parts(known.theta), strict=True)]
    left = [
        ref - theta
        for ref, theta in zip(refs, parts(begin(known, TABLE, refs, marks).theta), strict=True)
    ]
    expected = (np.zeros_like(progress[0]) if handed_in else progress[0], progress[1])
    for one, other in zip(left, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_draft_under_the_same_number_counts_as_handed_in() -> None:
    known = context()
    drafted = (Mark(3, 5, b"a" * 32), MARKS[1])
    assert begin(known, TABLE, known.refs, drafted).counts == (False, True)


def saved(tmp_path: Path, one: Context, owner: Owner = OWNER) -> Path:
    return SaveFolder(tmp_path, "learner").save(*packed(one, owner))


def read(path: Path) -> Context:
    return unpacked(*read_tensors(path, file_bytes_max(TABLE)), OWNER)


def test_a_context_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    known = context()
    found = read(saved(tmp_path, known))
    names = ("step", "at_ms", "inner", "marks", "work")
    assert [getattr(found, n) for n in names] == [getattr(known, n) for n in names]
    for one, other in zip(
        (found.theta, *found.moments, *found.refs),
        (known.theta, *known.moments, *known.refs),
        strict=True,
    ):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (dataclasses.replace(OWNER, run=RunId(b"s" * 32)), "another run"),
        (dataclasses.replace(OWNER, peer=PeerId(b"q" * 32)), "another identity"),
    ],
)
def test_a_foreign_context_is_refused(tmp_path: Path, owner: Owner, said: str) -> None:
    with pytest.raises(SaveFault, match=said):
        read(saved(tmp_path, context(), owner))


def test_a_context_of_another_format_or_model_is_refused(tmp_path: Path) -> None:
    metadata, arrays = packed(context(), OWNER)
    folder = SaveFolder(tmp_path, "learner")
    with pytest.raises(SaveFault, match="'dugnad context 0', not 'dugnad context 1'"):
        read(folder.save({**metadata, "format": "dugnad context 0"}, arrays))
    other = ModelConfig(dim=8, layers=1, heads=2, hidden=8, context=16)
    small = build_table(other.tensor_specs(), 2)
    with pytest.raises(SaveFault, match="theta is not"):
        unpacked(metadata, arrays, dataclasses.replace(OWNER, table=small))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"marks": (Mark(3, 4, b"a" * 32),)}, "speak of 2 fragments"),
        ({"marks": (Mark(3, 4, b"a"), MARKS[1])}, "malformed"),
        ({"marks": (Mark(-1, 4, b"a" * 32), MARKS[1])}, "malformed"),
        ({"work": Work((), (8,))}, "speak of 2 fragments"),
        ({"work": Work((), (8, 11))}, "beyond its own"),
        ({"work": Work((DoneStep(11, ()),), (8, 8))}, "beyond its own"),
        ({"work": Work((DoneStep(9, ()), DoneStep(9, ())), (8, 8))}, "do not rise"),
        ({"theta": np.full(TABLE.total, np.nan, np.float32)}, "theta is not finite"),
    ],
)
def test_a_context_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(SaveFault, match=said):
        read(saved(tmp_path, context(**changes)))


@pytest.mark.parametrize("inner", ["{}", '{"optimiser_steps":-1}', "nothing"])
def test_a_state_that_says_nothing_is_refused(inner: str) -> None:
    metadata, arrays = packed(context(), OWNER)
    with pytest.raises(SaveFault, match="where it stood"):
        unpacked({**metadata, "inner": inner}, arrays, OWNER)


def test_a_torn_file_is_named_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    folder = SaveFolder(tmp_path, "learner")
    saved(tmp_path, context(step=10))
    torn = saved(tmp_path, context(step=20))
    torn.write_bytes(torn.read_bytes()[:-100])
    found, faults = newest(folder, read)
    assert found is not None
    assert found.step == 10
    assert faults == [f"{torn.name} is skipped: it is torn: its checksum does not match"]
    assert newest(SaveFolder(tmp_path / "absent", "learner"), read) == (None, [])


@pytest.mark.parametrize(
    ("limits", "free", "said"),
    [
        (Limits(disk_gb=5.0), 50e9, ""),
        (Limits(disk_gb=5.0), 10e9, "are to stay free"),
        (Limits(disk_gb=2.0), 50e9, "disk_gb = 2: 1.5 GB are used"),
        (Limits(disk_gb=0.0), 50e9, ""),
        (Limits(keep_free_gb=60.0), 50e9, "60.0 GB are to stay free"),
    ],
)
def test_nothing_is_written_where_the_owners_limits_leave_no_room(
    limits: Limits, free: float, said: str
) -> None:
    reason = no_room(limits, int(1e9), int(1.5e9), int(free), int(200e9))
    assert (said in reason) if said else not reason


def test_captures_get_rarer_where_they_stop_training_or_wear_out_the_disk() -> None:
    assert interval(60.0, 0.01, 10**6) == 60.0
    assert interval(60.0, 0.9, 10**6) == 0.9 / STALL_SHARE
    assert interval(60.0, 0.01, 10**9) == 10**9 / WRITE_BYTES_PER_S
    assert drafts_written(10**6, 5.0)
    assert not drafts_written(10**7, 5.0)
