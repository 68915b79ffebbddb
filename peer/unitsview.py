"""What `dugnad units` shows: how many work units are in which state, and the oldest open ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from dugnad.averaging.credit import CreditFold
from dugnad.dht.ids import name_of, peer_text
from dugnad.peer import clock
from dugnad.peer.unitevents import OpenUnit, UnitsStatus
from dugnad.peer.unitreport import open_units_of

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

ROWS_MAX: Final = 64
"""Open units shown one by one: a screen or two; the counts are of all."""


def unit_counts(units: UnitsStatus, fold: CreditFold) -> dict[str, int]:
    """Units by state, from open to settled, then what the work core counts besides.

    `listed` and `settled` are of all epochs, in full; listed ones are provisional until settled.
    `twice`: units' worth of sequences that the lineage lists again; `lost`: given up by this peer.
    """
    unit_tokens = fold.rules.unit_sequences * fold.rules.sequence_tokens
    states = {
        "open": units.open,
        "claimed": units.claimed,
        "trained": units.trained,
        "listed": fold.units_covered,
        "settled": fold.units_settled,
        "twice": -(-fold.twice_tokens // unit_tokens),
        "lost": units.given_up,
        "covered": fold.units_covered,
    }
    rest = {k: v for k, v in msgspec.to_builtins(units).items() if isinstance(v, int)}
    return states | {key: value for key, value in rest.items() if key not in states}


def open_row(one: OpenUnit, me: bytes) -> dict[str, object]:
    """One open unit as plain values; `state` is how far it came, as far as this peer sees."""
    holder = one.holder
    return {
        "unit": f"{one.epoch}/{one.index}",
        "state": _state(one),
        "sequences": one.sequences,
        "listed": one.listed,
        "in_hand": one.in_hand,
        "trained": one.trained,
        "holder": "this peer" if holder == me else (name_of(holder) if holder else ""),
        "peer": peer_text(holder) if holder else "",
        "tries": one.tries,
        "overdue_s": round(one.overdue_s, 1),
    }


def _state(one: OpenUnit) -> str:
    if one.trained + one.listed >= one.sequences:
        return "trained"
    if one.in_hand or one.claimed:
        return "claimed"
    return "open"


def units_view(daemon: Daemon) -> Mapping[str, object]:
    """Everything, as the control API answers it."""
    now = clock.now()
    status = daemon.units.status(now)
    me = daemon.identity.peer
    return {
        **unit_counts(status, daemon.ledger.fold),
        "epoch_progress": status.epoch_progress,
        "rows": [open_row(one, me) for one in open_units_of(daemon.units.sight(now), ROWS_MAX)],
    }
