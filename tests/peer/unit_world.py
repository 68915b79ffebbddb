"""A core of work units whose participants are equally fast, and what the tests ask of it."""

from collections.abc import Iterable

from dugnad.averaging.formats import UnitPiece
from dugnad.dht.ids import PeerId
from dugnad.peer.units import (
    Contract,
    Interval,
    Participants,
    SwarmSpeed,
    UnitPlan,
    Units,
    WorkItem,
)

SEQUENCE_TOKENS = 100
CONTRACT = Contract(1, ("float32",), 1.0, splittable=True, attempts=3)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


A, B, C = peer(1), peer(2), peer(3)


def units(
    me: PeerId = A,
    *,
    sequences: int = 400,
    unit_sequences: int = 4,
    others: Iterable[PeerId] = (),
    attempts: int = 3,
    splittable: bool = True,
) -> Units:
    """A core whose participants are equally fast; window of 24 units of 4 (96 sequences)."""
    contract = Contract(1, ("float32",), 1.0, splittable, attempts)
    core = Units(
        me, UnitPlan(b"seed", sequences, unit_sequences), contract, sequence_tokens=SEQUENCE_TOKENS
    )
    core.handle(Interval(10.0), 0.0)
    core.handle(SwarmSpeed(160.0), 0.0)  # 1.6 sequences a second, 96 in six intervals
    core.handle(Participants(b"c", tuple((p, 10) for p in (me, *others))), 0.0)
    return core


def work(core: Units, wanted: int, now: float = 0.0) -> list[WorkItem]:
    return core.next_work(wanted, now)[0]


def all_work(core: Units, now: float = 0.0, step: int = 8) -> list[WorkItem]:
    """Everything that the core gives before it has to claim."""
    items: list[WorkItem] = []
    for _ in range(200):
        got, actions = core.next_work(step, now)
        if actions or not got:
            break
        items += got
    return items


def whole(core_units: Iterable[tuple[int, int]], size: int = 4) -> tuple[UnitPiece, ...]:
    return tuple(UnitPiece(epoch, index, 0, size) for epoch, index in core_units)
