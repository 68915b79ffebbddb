"""Plays a drawn scenario on a stage: who starts when, what befalls whom, who comes and goes."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Final

from dugnad.dht.ids import PeerId
from dugnad.simulation.membership import LINK_NAMES
from dugnad.simulation.numeric import NumpyTrainer
from dugnad.simulation.numericstage import NumericStage
from dugnad.simulation.people import SimPeer, peer_of
from dugnad.simulation.scenario import Drawn, Event, People
from dugnad.simulation.settings import WorldSettings
from dugnad.simulation.stage import Stage, Trap

NEWCOMERS_FROM: Final = 100
"""Numbers of peers that events add; those who come by themselves are numbered from 1000."""
ARRIVALS_FROM: Final = 1000
SESSION_MAX: Final = 50.0
"""A session is at most this many times the shortest one: Pareto's tail has no end."""


def _stage(drawn: Drawn, settings: WorldSettings) -> Stage:
    """The stage that a scenario asks for: with played learners, or with real ones."""
    numeric = drawn.scenario.numeric
    if numeric is None:
        return Stage(settings)
    trainer = NumpyTrainer.of(numeric, settings.fragments, drawn.seed)
    return NumericStage(settings, trainer, evaluate_s=numeric.evaluate_s)


class Play:
    """One scenario on one stage. ``begin`` schedules everything."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        scenario, swarm = drawn.scenario, drawn.scenario.swarm
        settings = WorldSettings(
            seed=drawn.seed,
            peers=swarm.peers,
            fragments=swarm.fragments,
            interval_s=swarm.interval_s,
            step_s=swarm.step_s,
            codec=swarm.codec,
            rule=swarm.rule,
            eta=swarm.eta,
            mu=swarm.mu,
            roster=swarm.roster,
            mesh_max=swarm.mesh_max,
            links=swarm.links,
            pieces=swarm.pieces,
            units=swarm.units and swarm.roster,
            weather=drawn.weather,
        )
        self.stage = _stage(drawn, settings)
        self.end = scenario.seconds
        self.added = 0
        self.arrived = 0
        self.newcomers: set[PeerId] = set()
        self.sides: dict[str, frozenset[PeerId]] = {}
        """Who was on which side of the newest split: 'left' and 'right'."""

    def begin(self) -> None:
        """Start the swarm and plan what will happen."""
        stage, swarm = self.stage, self.drawn.scenario.swarm
        if stage.members is not None:
            stage.members.seeds = tuple(range(min(swarm.peers, LINK_NAMES)))
        stage.outbound = set(range(swarm.peers - swarm.outbound, swarm.peers))
        for number in range(swarm.peers):
            rng = stage.rng("start", number)
            stage.skew[number] = rng.uniform(-swarm.clock_skew_s, swarm.clock_skew_s)
            step_s = swarm.step_s * (swarm.slow_factor if number < swarm.slow else 1.0)
            stage.later(rng.uniform(0.0, swarm.stagger_s), partial(self._start, number, step_s))
        stage.later(swarm.stagger_s, stage.gossip)
        for index, event in enumerate(self.drawn.scenario.event):
            stage.later(event.at_s, partial(self._befall, event, stage.rng("event", index)))
        people = self.drawn.scenario.people
        if people.arrivals_per_min:
            self._expect(people, stage.rng("arrivals"))

    def _start(self, number: int, step_s: float) -> None:
        sim = self.stage.add(number, step_s=step_s)
        self._live(sim)

    # -- events ------------------------------------------------------------------------------------

    def _befall(self, event: Event, rng: random.Random) -> None:
        if event.upon:
            trap = Trap(
                event.upon,
                lambda actor: self._act(event, rng, actor),
                times=event.times,
                skip=event.skip,
                reach=event.reach,
            )
            self.stage.traps.append(trap)
        else:
            self._act(event, rng, None)

    def _chosen(self, who: str, rng: random.Random, actor: SimPeer | None) -> list[PeerId]:
        stage = self.stage
        alive = [sim.peer for sim in stage.alive()]
        match who:
            case "actor":
                return [actor.peer] if actor is not None else []
            case "any":
                return [rng.choice(alive)] if alive else []
            case "first":
                return alive[:1]
            case "newest":
                return alive[-1:]
            case "all":
                return alive
            case "home":
                homes = [sim.fragments[0].core.view.current_home() for sim in stage.alive()]
                named = [one for one in homes if one is not None]
                return [max(sorted(set(named)), key=named.count)] if named else []
            case "minority" | "half":
                most = (len(alive) - 1) // 2
                count = len(alive) // 2 if who == "half" else rng.randint(min(1, most), most)
                return sorted(rng.sample(alive, count))
            case "dead":
                return sorted(sim.peer for sim in stage.peers.values() if not sim.alive)
        return [peer_of(int(number)) for number in who.split()]

    def _act(self, event: Event, rng: random.Random, actor: SimPeer | None) -> None:
        stage = self.stage
        chosen = self._chosen(event.who, rng, actor)
        numbers = ", ".join(str(stage.peers[one].number) for one in chosen if one in stage.peers)
        upon = f" upon {event.upon} of {actor.number}" if actor is not None else ""
        stage.say(f"{event.do} {numbers if event.do != 'add' else event.count}{upon}")
        if event.do == "add":
            self._add(event)
        elif event.do == "split":
            self._split(chosen, event)
        else:
            for peer in chosen:
                self._strike(event, stage.peers[peer], rng)

    def _strike(self, event: Event, sim: SimPeer, rng: random.Random) -> None:
        """What an event does to one peer."""
        stage, peer, lasts = self.stage, sim.peer, event.seconds or self.end - self.stage.now
        if event.do == "restart":
            if not sim.alive:
                self._back(sim, with_disk=event.disk)
            return
        if not sim.alive:
            return
        others = [one.peer for one in stage.alive() if one is not sim]
        match event.do:
            case "kill":
                stage.kill(peer, quietly=event.quiet)
            case "leave":
                stage.leave(peer)
            case "freeze" | "sleep":
                stage.freeze(peer, lasts, asleep=event.do == "sleep")
            case "p2pd":
                stage.lose_substrate(peer, lasts)
            case "double" if stage.members is not None:
                stage.members.double(sim)
            case "false_end":
                count = max(1, len(others) // 2)
                stage.false_end(peer, rng.sample(others, min(count, len(others))), lasts)
            case "isolate":
                cut = stage.part([peer], others)
                stage.later(lasts, partial(stage.join, cut))
            case "idle" | "withhold" | "miss" | "corrupt":
                stage.until[(event.do, peer)] = stage.now + lasts
            case "snapshot":
                stage.snapshots[peer] = sim.disk.copy()
            case "restore":
                stage.restore(peer)
            case "claim":
                stage.claims[peer] = event.factor
            case "speed":
                sim.step_s /= event.factor

    def _split(self, left: list[PeerId], event: Event) -> None:
        stage = self.stage
        right = [sim.peer for sim in stage.alive() if sim.peer not in left]
        self.sides = {"left": frozenset(left), "right": frozenset(right)}
        cut = stage.part(left, right, one_way=event.one_way)
        stage.later(event.seconds or self.end - stage.now, partial(stage.join, cut))

    def _add(self, event: Event) -> None:
        """Newcomers, perhaps with nobody but each other, or on one side of a split."""
        stage = self.stage
        first = NEWCOMERS_FROM + self.added
        self.added += event.count
        numbers = range(first, first + event.count)
        peers = [peer_of(number) for number in numbers]
        away: set[PeerId] = set()
        if event.alone:
            away = set(stage.peers)
        elif event.beside:
            away = set(self.sides.get("right" if event.beside == "left" else "left", ()))
        if away:
            cut = stage.part(peers, away)
            stage.later(event.seconds or self.end - stage.now, partial(stage.join, cut))
        for number in numbers:
            self.newcomers.add(peer_of(number))
            stage.add(number)

    # -- people ------------------------------------------------------------------------------------

    def _expect(self, people: People, rng: random.Random) -> None:
        stage = self.stage

        def arrive() -> None:
            if stage.now >= self.end:
                return
            if rng.random() < _daylight(people, stage.now) and (
                len(stage.alive()) < people.peers_max
            ):
                number = ARRIVALS_FROM + self.arrived
                self.arrived += 1
                self.newcomers.add(peer_of(number))
                stage.say(f"{number} arrives")
                self._live(stage.add(number))
            self._expect(people, rng)

        busiest = people.arrivals_per_min * (1.0 + people.day_swing) / 60.0
        stage.later(rng.expovariate(busiest), arrive)

    def _live(self, sim: SimPeer) -> None:
        """Plan the end of a peer's session."""
        people, stage, born = self.drawn.scenario.people, self.stage, sim.born
        if not people.session_s:
            return
        rng = stage.rng("session", sim.number, born)
        session = people.session_s * min(rng.paretovariate(people.tail), SESSION_MAX)

        def end() -> None:
            same = stage.peers[sim.peer].born == born and sim.alive
            if not same or stage.now >= self.end or len(stage.alive()) < 2:
                return
            kinds = ("crash", "leave", "freeze")
            weights = (people.crash, people.leave, people.freeze)
            (kind,) = rng.choices(kinds, weights)
            stage.say(f"{kind} of {sim.number}")
            if kind == "freeze":
                stage.freeze(sim.peer, people.freeze_s)
                stage.later(people.freeze_s + session, end)
                return
            stage.kill(sim.peer) if kind == "crash" else stage.leave(sim.peer)
            if rng.random() < people.returning:
                away = rng.expovariate(1.0 / people.away_s)
                stage.later(away, partial(self._return, sim, rng.random() < people.with_disk))

        stage.later(session, end)

    def _return(self, sim: SimPeer, with_disk: bool) -> None:
        """Somebody comes back; who is still handing over is waited for."""
        stage = self.stage
        if stage.now >= self.end or stage.peers[sim.peer] is not sim:
            return
        if sim.alive:
            stage.later(1.0, partial(self._return, sim, with_disk))
        else:
            stage.say(f"{sim.number} comes back {'with' if with_disk else 'without'} its disk")
            self._live(self._back(sim, with_disk=with_disk))

    def _back(self, sim: SimPeer, *, with_disk: bool) -> SimPeer:
        """Start a dead peer again. Its key is on the disk: without one it is somebody new."""
        if with_disk:
            return self.stage.restart(sim.peer)
        number = ARRIVALS_FROM + self.arrived
        self.arrived += 1
        self.newcomers.add(peer_of(number))
        return self.stage.add(number, step_s=sim.step_s)


def _daylight(people: People, now: float) -> float:
    """The rate of arrivals as a share of the day's highest: a sine that begins at its mean."""
    if not people.day_s:
        return 1.0
    wave = 1.0 + people.day_swing * math.sin(2.0 * math.pi * now / people.day_s)
    return wave / (1.0 + people.day_swing)
