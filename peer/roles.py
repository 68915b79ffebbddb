"""What a peer does for the run, and which peers share the training: pure rules.

Its owner lists roles; what the machine cannot do is left out, and a machine that cannot train falls
back to evaluating, or to preparing units for others. The roles stand in the advert, and nobody
whose advert lacks `train` is ever assigned a unit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dugnad.dht.ids import PeerId
from dugnad.peer.contract import Capabilities, Contract, can_take
from dugnad.peer.settingparse import ROLES
from dugnad.peer.unitevents import Participants

TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
PREPARE: Final = "prepare"
MERGE: Final = "merge"
"""Said by whoever can be reached, and set by nobody."""
LESS: Final = {EVALUATE: "evaluates", PREPARE: "prepares units"}
"""What a machine does that can do nothing of what its owner asked for; the first that it can."""


@dataclass(frozen=True, slots=True)
class Duties:
    """The roles that this machine takes, and why it does not do all that its owner asked for."""

    roles: tuple[str, ...]
    why: str = ""

    def __contains__(self, role: object) -> bool:
        return role in self.roles


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of this machine (`contract.Capabilities`)."""

    memory_bytes: int | None
    flops: Mapping[str, float]
    kinds: frozenset[str] = frozenset()


def duties(
    wanted: Sequence[str], contracts: Mapping[str, Contract], machine: Capabilities
) -> Duties:
    """Which of the `wanted` roles the machine can take; none of them: evaluating, if it can that,
    or preparing.

    No role at all comes back when it can do nothing for this run: `why` says what is missing.
    """
    refusals: dict[str, str] = {}
    for role in ROLES:
        fits, why = can_take(contracts[role], machine)
        if not fits:
            refusals[role] = why
    taken = tuple(role for role in ROLES if role in wanted and role not in refusals)
    lacking = "; ".join(f"it cannot {r}: {refusals[r]}" for r in wanted if r in refusals)
    if taken:
        return Duties(taken, lacking)
    for role, does in LESS.items():
        if role not in refusals:
            return Duties((role,), f"{lacking}; it {does} instead")
        if role not in wanted:
            lacking += f"; nor can it {role}: {refusals[role]}"
    return Duties((), lacking)


def without_training(known: Duties, contracts: Mapping[str, Contract], why: str) -> Duties:
    """The duties of a machine whose learner showed that it cannot train; see `duties`."""
    prepares = tuple(role for role in known.roles if role == PREPARE)
    if EVALUATE in known or contracts[EVALUATE].memory_bytes < contracts[TRAIN].memory_bytes:
        instead = f"it cannot train: {why}; it evaluates instead"
        return Duties((EVALUATE, *prepares), instead)
    return Duties((PREPARE,), f"it cannot train: {why}; it prepares units instead")


def advertised(known: Duties, *, may_work: bool, can_home: bool) -> tuple[str, ...]:
    """The roles for the advert: a peer that rests for its owner's sake is assigned nothing."""
    roles = known.roles if may_work else ()
    return (*roles, MERGE) if can_home else roles


def sharing(
    commit: bytes,
    members: Sequence[tuple[PeerId, int]],
    live: Sequence[tuple[PeerId, int]],
    trains: Callable[[PeerId], bool],
) -> Participants:
    """Who shares the work: the members of a commit, and of the `live` those that are none yet.

    `trains` says of a peer whether its advert takes units, True where no advert is known.
    """
    known = {peer for peer, _ in members}
    return Participants(
        commit,
        tuple((peer, speed) for peer, speed in members if trains(peer)),
        tuple(sorted((p, speed) for p, speed in live if p not in known and trains(p))),
    )
