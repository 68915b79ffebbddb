"""Where the work stands, for people: counted from what the core of work units knows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dugnad.dht.ids import PeerId
from dugnad.peer.unitclaims import ClaimTable
from dugnad.peer.unitevents import OpenUnit, UnitsStatus
from dugnad.peer.unitplan import UnitPlan
from dugnad.peer.unittable import UnitState, UnitTable


@dataclass(frozen=True, slots=True)
class Sight:
    """The core of one peer at one moment: `open` are the positions of open units, ascending."""

    me: PeerId
    now: float
    plan: UnitPlan
    table: UnitTable
    claims: ClaimTable
    owner: Callable[[int], PeerId | None]
    due: Mapping[int, float]
    open: Sequence[int]

    def holder(self, position: int) -> PeerId | None:
        """Who is to do a unit: whoever claimed it, else its owner."""
        return self.claims.holder(position, self.now) or self.owner(position)


def status_of(sight: Sight) -> UnitsStatus:
    """The counts; see `UnitsStatus`."""
    table, plan = sight.table, sight.plan
    first = sight.open[0] if sight.open else table.floor
    epoch = plan.unit(first)[0]
    start = epoch * plan.units_per_epoch
    listed = table.covered_sequences(start, start + plan.units_per_epoch)
    states = [state for _, state in table.items()]
    claimed = (table.given(p) or sight.claims.holder(p, sight.now) for p in sight.open)
    return UnitsStatus(
        epoch=epoch,
        epoch_progress=listed / plan.sequences,
        epoch_sequences=plan.sequences,
        epoch_listed=listed,
        open=len(sight.open),
        mine=sum(sight.holder(position) in (sight.me, None) for position in sight.open),
        claimed=sum(map(bool, claimed)),
        trained=sum(bool(s.trained & ~s.covered) for s in states),
        claimed_sequences=sum(s.given.bit_count() for s in states),
        trained_sequences=sum((s.trained & ~s.covered).bit_count() for s in states),
        covered_sequences=table.covered_sequences(0, table.end()),
        twice_sequences=table.twice(),
        given_up=table.given_up(),
        held=len(table),
    )


def open_units_of(sight: Sight, limit: int) -> list[OpenUnit]:
    """The oldest open units, at most `limit`."""
    return [_open_unit(sight, position) for position in sight.open[: max(limit, 0)]]


def _open_unit(sight: Sight, position: int) -> OpenUnit:
    state = sight.table.held(position) or UnitState()
    return OpenUnit(
        *sight.plan.unit(position),
        sequences=sight.table.size(position),
        listed=state.covered.bit_count(),
        in_hand=state.given.bit_count(),
        trained=(state.trained & ~state.covered).bit_count(),
        holder=sight.holder(position),
        claimed=sight.claims.holder(position, sight.now) is not None,
        tries=state.tries,
        overdue_s=sight.now - sight.due.get(position, sight.now),
    )
