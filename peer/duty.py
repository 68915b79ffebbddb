"""What this daemon does for the run: decided when it starts, and again when its learner cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from dugnad.dht.ids import PeerId
from dugnad.peer.assembly import contracts
from dugnad.peer.config import usable_cores
from dugnad.peer.consent import memory_available
from dugnad.peer.errors import UserError
from dugnad.peer.limits import memory_cap
from dugnad.peer.manifest import PROCESS_BYTES
from dugnad.peer.modelconfig import BYTES_PER_PARAMETER
from dugnad.peer.probe import cached
from dugnad.peer.roles import (
    EVALUATE,
    PREPARE,
    TRAIN,
    Duties,
    Machine,
    advertised,
    duties,
    without_training,
)
from dugnad.peer.settingparse import numbers_of
from dugnad.peer.trainer import LearnerPlan

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon


def others_with(role: str, daemon: Daemon) -> list[PeerId]:
    """Live peers whose adverts say that they do this."""
    roster = daemon.swarm.roster
    adverts = [] if roster is None else map(roster.advert, daemon.averager.live())
    return [one.peer for one in adverts if one is not None and role in one.roles]


class Duty:
    """The roles of one daemon. `decide` comes first, when the manifest is known."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.duties = Duties(())

    @property
    def trains(self) -> bool:
        """Whether it trains, when its owner's limits let it."""
        return TRAIN in self.duties

    @property
    def learns(self) -> bool:
        """Whether it needs a learner: preparing units is done without one."""
        return self.trains or EVALUATE in self.duties

    def decide(self) -> None:
        """From what the owner wants and what the machine is. UserError E021 when it can do
        nothing for this run."""
        settings, manifest = self.daemon.settings, self.daemon.manifest
        probe = cached(self.daemon.home.root, usable_cores())
        machine = Machine(
            memory_bytes=min(self._memory_cap(), memory_available()),
            flops=probe.flops if probe is not None else {},
            kinds=probe.kinds if probe is not None else frozenset(),
        )
        self._take(duties(settings.roles, contracts(manifest), machine))

    def cannot_train(self, why: str) -> None:
        """The learner showed it; see `decide`."""
        self._take(without_training(self.duties, contracts(self.daemon.manifest), why))

    def _take(self, found: Duties) -> None:
        if not found.roles:
            raise UserError(
                "E021",
                found.why,
                "close other programs, or let it have more (memory_mb in config.toml)",
            )
        self.duties = found
        if found.why:
            self.daemon.note("roles", found.why)

    def state(self) -> tuple[str, str]:
        """In one word what it does when nothing stands against it, and why it does not train."""
        if self.trains:
            return "training", ""
        word, role = ("evaluating", EVALUATE) if self.learns else ("preparing", PREPARE)
        return word, self.duties.why or f"roles = {role}: its owner wants it so"

    def advertised(self) -> tuple[str, ...]:
        """The roles for the advert, now."""
        may_work = not self.daemon.steward.rests
        can_home = not self.daemon.settings.outbound_only
        return advertised(self.duties, may_work=may_work, can_home=can_home)

    def takes_units(self, peer: PeerId) -> bool:
        """Whether a peer's advert says that it trains; True where none is known."""
        if peer == self.daemon.identity.peer:
            return self.trains and not self.daemon.steward.rests
        roster = self.daemon.swarm.roster
        advert = roster.advert(peer) if roster is not None else None
        return advert is None or TRAIN in advert.roles

    def plan(self) -> LearnerPlan:
        """How the learner is started."""
        daemon, settings, manifest = self.daemon, self.daemon.settings, self.daemon.manifest
        return LearnerPlan(
            config=manifest.model,
            table=manifest.table,
            optimiser=manifest.inner,
            tokens=daemon.shards.tokens_path,
            threads=settings.threads or 1,
            micro_batch_max=self._micro_batch_max(),
            forward_only=not self.trains,
            cpu_share=settings.cpu_share,
            gpu_share=settings.gpu_share,
            cores=numbers_of(settings.cores),
            gpus=settings.gpus(),
            device="cpu" if settings.gpu == "none" else "auto",
            seed=int.from_bytes(daemon.identity.peer[:4], "little"),
        )

    def _micro_batch_max(self) -> int:
        """Sequences at a time for which the owner's memory has room on a CPU, at least 1."""
        model = self.daemon.manifest.model
        room = self._memory_cap() - PROCESS_BYTES - BYTES_PER_PARAMETER * model.parameter_count()
        return max(1, room // model.activation_bytes(1))

    def _memory_cap(self) -> int:
        return memory_cap(self.daemon.settings.limits(), psutil.virtual_memory().total)
