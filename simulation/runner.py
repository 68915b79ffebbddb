"""Runs a drawn scenario: chaos with safety checks after each event, healing, calm, the verdict.

A violation never stops a series: it is part of the :class:`Result`, with the seed, what was drawn,
what was done to the swarm, and the story of the peer concerned. The same scenario and seed give
the same digest anywhere.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from dugnad.dht.ids import PeerId
from dugnad.simulation.checks import Violation
from dugnad.simulation.numericstage import Contact, Loss, NumericStage
from dugnad.simulation.people import SimPeer
from dugnad.simulation.play import Play
from dugnad.simulation.scenario import Drawn, Hold, Plain
from dugnad.simulation.settings import UNIT_SEQUENCES, WALL_START_S
from dugnad.simulation.stage import Sample, Stage
from dugnad.simulation.story import told

STORY_LINES: Final = 60
"""Lines of a peer's story in a report: two or three versions."""
LOOK_S: Final = 0.2
"""How often the heads are compared after the healing."""
PARTICIPATION_FROM: Final = 3
"""Commits after the healing that say nothing about participation yet: who was away joins."""


LAST_RESORT: Final = 9999
"""The peer that comes when the healing finds nobody who can be home."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that was broken."""

    what: str
    story: str = ""


@dataclass(slots=True)
class Result:
    """What came of one scenario with one seed. Shares are of one, times virtual seconds."""

    scenario: str
    seed: int
    options: dict[str, Plain]
    violations: list[Broken] = field(default_factory=list)
    goodput: float = 0.0
    """Steps listed / steps made, without those that live peers still hold."""
    participation: float = 0.0
    """Of live peers and commits after the healing: the share that lists the peer's work."""
    coverage: float = 0.0
    """Distinct pieces of units listed / pieces made, without those still held."""
    twice: float = 0.0
    """Of the sequences trained: the share that somebody had trained before."""
    claims: int = 0
    """Messages by which peers took units out of order."""
    longest_gap: float = 0.0
    detection: float = 0.0
    """The longest time from a death to a roster's verdict on it."""
    one_head_s: float = -1.0
    """From the healing until all had one head of each fragment; -1: never."""
    bytes: int = 0
    messages: int = 0
    events: int = 0
    merges: int = 0
    digest: str = ""
    virtual_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    """Held-out loss over time, and at the end; empty where learning is played."""
    contacts: list[Contact] = field(default_factory=list)
    timeline: list[tuple[float, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations


def play(drawn: Drawn, tick: Callable[[float], None] = lambda _: None) -> Result:
    """Run one scenario; ``tick`` is told how far it is, from 0 to 1."""
    act = Play(drawn)
    result = Result(drawn.name, drawn.seed, drawn.options)
    try:
        act.begin()
        _perform(act, result, tick)
        result.violations += _verdict(act, result)
    except Violation as violation:
        what, _, rest = str(violation).partition("\nseed ")
        story = "\n".join(rest.splitlines()[1:][-STORY_LINES:])
        result.violations.append(Broken(what, story))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        lines = traceback.format_exception(fault)[-3:]
        result.violations.append(Broken(f"a core failed: {fault!r}", "".join(lines)))
    _count(act.stage, result)
    return result


def _perform(act: Play, result: Result, tick: Callable[[float], None]) -> None:
    """Chaos, healing, calm."""
    stage, scenario = act.stage, act.drawn.scenario
    whole = scenario.seconds + scenario.calm_s
    while stage.now < scenario.seconds:
        stage.run(min(scenario.seconds, stage.now + whole / 20.0))
        tick(stage.now / whole)
    if not _able(stage):  # nobody is left, or nobody that can be home
        stage.restart_all()
    if not _able(stage):
        stage.add(LAST_RESORT)
    before = _favourite(act)
    open_then = _open_units(stage)
    stage.say("everything heals")
    calm = replace(stage.settings.weather, loss=0.0, duplication=0.0, send_loss=0.0, fetch_loss=0.0)
    stage.settings = replace(stage.settings, weather=calm)
    stage.mend()
    end = scenario.seconds + scenario.calm_s
    for sim in stage.alive():
        if sim.frozen_until > stage.now:
            stage.disturbed[sim.peer] = sim.frozen_until
    fragments = range(stage.settings.fragments)
    merges = [len(times) for times in stage.merged_at]
    agreed: set[int] = set()
    mark = _mark(act)
    while stage.now < end:
        stage.run(min(end, stage.now + LOOK_S))
        if stage.work is not None and stage.now >= mark:
            mark = math.inf
            result.violations += [Broken(what, _story(stage)) for what in _open(stage, open_then)]
        agreed |= {p for p in fragments if len(stage.heads(p)) == 1}
        if result.one_head_s < 0 and len(agreed) == len(fragments):
            result.one_head_s = round(stage.now - scenario.seconds, 6)  # a whole number of looks
    tick(1.0)
    hold = scenario.hold
    if stage.work is not None and hold.covered:
        every = hold.listed_intervals or math.inf
        faults = stage.work.unlisted(_listed(stage), scenario.seconds, stage.claims, every)
        result.violations += [Broken(what, _story(stage)) for what in faults]
    for p in fragments:
        if len(stage.merged_at[p]) < merges[p] + hold.merges_min:
            made = len(stage.merged_at[p]) - merges[p]
            result.violations.append(
                Broken(f"only {made} commits of fragment {p} after the healing", _story(stage))
            )
    if hold.majority_wins and before is not None and not _kept(stage, before):
        what = "the lineage that most old members had at the healing was left"
        result.violations.append(Broken(what, _story(stage)))


def _mark(act: Play) -> float:
    """When the units that are open at the healing have to be listed."""
    scenario, hold = act.drawn.scenario, act.drawn.scenario.hold
    wait = hold.covered_intervals * act.stage.settings.interval_s
    return scenario.seconds + wait if hold.covered else math.inf


def _open(stage: Stage, units: list[tuple[int, int]]) -> list[str]:
    """What of these units, which were open at the healing, still is."""
    left = stage.work.still_open(units, _listed(stage)) if stage.work is not None else []
    return [f"unit {unit} is open since the healing" for unit in left]


def _listed(stage: Stage) -> set[tuple[int, int, int]]:
    """The sequences that the best heads list."""
    return stage.credits.listed([stage.best(p) for p in range(stage.settings.fragments)])


def _open_units(stage: Stage) -> list[tuple[int, int]]:
    """The oldest units that are open at the healing, two for each peer."""
    if stage.work is None:
        return []
    return stage.work.oldest_open(_listed(stage), 2 * len(stage.alive()))


def _able(stage: Stage) -> bool:
    """Whether a live peer can be home and does not leave."""
    return any(
        sim.number not in stage.outbound and not sim.fragments[0].core.view.leaving
        for sim in stage.alive()
    )


def _favourite(act: Play) -> bytes | None:
    """The head of fragment 0 that most old members have, or have built on, at the healing."""
    heads = [
        sim.fragments[0].core.head
        for sim in act.stage.alive()
        if sim.peer not in act.newcomers and sim.peer not in act.stage.claims
    ]
    if not heads:
        return None
    # a head stands for all that descend from it: some have one commit more than others
    below = {one.digest: act.stage.ledger.line(one.digest) for one in heads}
    return min(
        heads,
        key=lambda one: (-sum(one.digest in below[other.digest] for other in heads), one.version),
    ).digest


def _kept(stage: Stage, digest: bytes) -> bool:
    wanted = stage.ledger.commits.get(digest)
    chain = stage.ledger.chain(stage.best(0))
    return wanted is None or any(one.header == wanted.header for one in chain)


def _verdict(act: Play, result: Result) -> list[Broken]:
    """What of the scenario's ``hold`` does not hold."""
    stage, hold = act.stage, act.drawn.scenario.hold
    _count(stage, result)
    broken: list[Broken] = []
    if not 0 <= result.one_head_s <= hold.one_head_within_s:
        heads = "; ".join(_heads(sim) for sim in stage.alive())
        broken.append(
            Broken(f"not one head within {hold.one_head_within_s} s: {heads}", _story(stage))
        )
    interval = stage.settings.interval_s
    longest = hold.merge_gap_intervals * interval + hold.merge_gap_detect_s
    if hold.merge_gap_intervals and result.longest_gap > longest:
        what = f"{result.longest_gap:.1f} s without a commit, more than {longest:.1f}"
        broken.append(Broken(what, _story(stage)))
    for name in ("goodput", "participation", "coverage"):
        least, got = float(getattr(hold, f"{name}_min")), float(getattr(result, name))
        if got < least:
            broken.append(Broken(f"{name} is {got:.3f}, below {least}", _story(stage)))
    broken += [Broken(what, _story(stage)) for what in _losses(result, hold)]
    if stage.members is not None:
        if hold.doubles_told_within_s:
            doubles = stage.members.undetected(hold.doubles_told_within_s)
            broken += [Broken(what, _story(stage)) for what in doubles]
        views = ((sim, stage.members.fault(sim)) for sim in stage.alive())
        broken += [Broken(what, _story(stage, sim)) for sim, what in views if what]
    broken += [Broken(what) for what in stage.transfers.faults(hold.named_min)]
    if len(stage.donors) < hold.donors_min:
        broken.append(Broken(f"only {len(stage.donors)} peers served whole anchors"))
    for sim in stage.alive():
        broken += _peer_verdict(act, sim, hold)
    return broken


def _losses(result: Result, hold: Hold) -> list[str]:
    """What of a numeric scenario's losses is not as it should be."""
    broken = []
    if hold.loss_max and not (result.losses and result.losses[-1].loss <= hold.loss_max):
        ended = result.losses[-1].loss if result.losses else float("nan")
        broken.append(f"the held-out loss ends at {ended:.4f}, above {hold.loss_max}")
    for contact in result.contacts if hold.loss_after_contact else ():
        limit = contact.before * hold.loss_after_contact
        if contact.after is None:
            broken.append(f"no common heads after the contact at {contact.at_s:.1f} s")
        elif not contact.after <= limit:
            what = f"the loss after the contact at {contact.at_s:.1f} s is {contact.after:.4f}"
            broken.append(f"{what}; the better side had {contact.before:.4f} before it")
    return broken


def _peer_verdict(act: Play, sim: SimPeer, hold: Hold) -> list[Broken]:
    stage, broken = act.stage, list[Broken]()
    credit = stage.credits.fault(sim)
    if credit:
        broken.append(Broken(f"peer {sim.number}: {credit}", _story(stage, sim)))
    undisturbed = max(stage.disturbed.get(sim.peer, 0.0), stage.started[(sim.peer, sim.born)])
    for p, fragment in enumerate(sim.fragments):
        head = fragment.core.head
        row = next((one for one in head.members if one.peer == sim.peer), None)
        age = head.version - (row.version if row is not None else 0)
        waited = (stage.now - undisturbed) / stage.settings.interval_s
        asked = hold.listed_within_versions
        if asked and waited > asked + 1 and age > asked:
            what = f"peer {sim.number} is not listed in the last {age} versions of fragment {p}"
            broken.append(Broken(what, _story(stage, sim)))
        given_up = float(abs(fragment.given_up).max())
        if hold.given_up_zero and given_up > 0.0:
            what = f"peer {sim.number} gave up progress of fragment {p} ({given_up:.2e})"
            broken.append(Broken(what, _story(stage, sim)))
    if hold.useful_within_s and sim.peer in act.newcomers:
        first = stage.first_listed.get((sim.peer, sim.born), stage.now)
        took = first - max(stage.started[(sim.peer, sim.born)], undisturbed)
        if took > hold.useful_within_s:
            what = f"newcomer {sim.number} was useful only after {took:.1f} s"
            broken.append(Broken(what, _story(stage, sim)))
    return broken


def _count(stage: Stage, result: Result) -> None:
    """The numbers of a report, as far as the run came."""
    result.bytes, result.messages, result.events = stage.bytes, stage.messages, stage.events
    if stage.members is not None:
        result.bytes += stage.members.rosters.bytes
        result.messages += stage.members.rosters.messages
        result.detection = max(stage.members.detected, default=0.0)
    result.merges = sum(len(times) for times in stage.merged_at)
    result.digest, result.virtual_s = stage.digest(), stage.now
    result.samples, result.timeline = stage.samples, stage.timeline
    if isinstance(stage, NumericStage):
        result.losses = [*stage.losses, stage.measured()]
        result.contacts = stage.contacts
    gaps = [0.0]
    for times in stage.merged_at:
        if times:
            gaps += [b - a for a, b in itertools.pairwise([*times, stage.now])]
    result.longest_gap = max(gaps)
    if not stage.alive():
        return
    fragments = range(stage.settings.fragments)
    listed = sum(stage.ledger.listed_steps.get(stage.best(p), 0) for p in fragments)
    made = max(1, stage.made - sum(stage.pending(p) for p in fragments))
    result.goodput = listed / made
    pieces = [
        {
            (one.epoch, one.index, place)
            for record in stage.ledger.chain(stage.best(p))
            for row in record.inputs
            for one in row.pieces
            for place in range(one.start, min(one.stop, UNIT_SEQUENCES))  # liars name more
        }
        for p in fragments
    ]
    result.coverage = sum(len(one) for one in pieces) / made
    if stage.work is not None:
        result.twice = stage.work.twice() / max(1, sum(stage.work.trained.values()))
        result.claims = stage.work.claims
    result.participation = _participation(stage)


def _participation(stage: Stage) -> float:
    """Of the newest commits of the lineage: how often a live peer is in one or the next."""
    hits = asked = 0
    for p in range(stage.settings.fragments):
        chain = stage.ledger.chain(stage.best(p))[::-1]
        lists = [{one.contribution.peer for one in record.inputs} for record in chain]
        since = [_since(stage, sim) for sim in stage.alive()]
        for sim, start in zip(stage.alive(), since, strict=True):
            wall = start + PARTICIPATION_FROM * stage.settings.interval_s
            for index, record in enumerate(chain[:-1]):
                if record.header.time_ms / 1000.0 >= wall:
                    asked += 1
                    hits += PeerId(sim.peer) in lists[index] | lists[index + 1]
    return hits / asked if asked else 1.0


def _since(stage: Stage, sim: SimPeer) -> float:
    """Wall time from which a peer could take part undisturbed."""
    return WALL_START_S + max(
        stage.disturbed.get(sim.peer, 0.0), stage.started.get((sim.peer, sim.born), 0.0)
    )


def _heads(sim: SimPeer) -> str:
    heads = (fragment.core.head for fragment in sim.fragments)
    return f"peer {sim.number} " + " ".join(f"v{h.version} {h.digest.hex()[:6]}" for h in heads)


def _story(stage: Stage, sim: SimPeer | None = None) -> str:
    """The end of the story of a peer, or of the first live one."""
    who = sim or next(iter(stage.alive()), None)
    return told(who.number, list(who.story)[-STORY_LINES:]) if who is not None else ""
