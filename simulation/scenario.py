"""Scenarios: what happens to a simulated swarm and what must hold, as data (TOML).

A scenario is two phases: chaos, in which things happen and only safety is checked, and calm, after
everything healed, in which the swarm must also get on. Wherever a number or a word stands, a
scenario may instead say `{low = 1, high = 3}` or a list to choose from; each such option is drawn
from a generator of its own, named by the seed and the option's path, so that a new option shifts
no other.
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Final, Literal

import msgspec

from dugnad.dht.roster import MESH_MAX
from dugnad.simulation.numeric import Numeric, NumericError
from dugnad.simulation.settings import Weather

EVENTS_MAX: Final = 100
"""Events of one scenario; more is a program, not a scenario."""
PEERS_MAX: Final = 64
"""Peers of one swarm: a full mesh (DESIGN.md section 8)."""
JITTER: Final = 0.4
"""Sigma of the messages' times in a scenario that does not say: one in twenty takes twice as long
as usual."""
SECONDS_MAX: Final = 36_000.0
"""Ten virtual hours of either phase."""

Plain = bool | int | float | str
Action = Literal[
    "add",
    "claim",
    "corrupt",
    "double",
    "false_end",
    "freeze",
    "idle",
    "isolate",
    "kill",
    "leave",
    "miss",
    "p2pd",
    "restart",
    "restore",
    "sleep",
    "snapshot",
    "speed",
    "split",
    "withhold",
]
Moment = Literal["", "merge", "sign", "commit", "fetch", "donate", "join"]


class ScenarioError(ValueError):
    """A scenario that cannot be played; the text names the file, the key and what is wrong."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a scenario: unknown keys are errors."""


class Swarm(_Table, frozen=True, kw_only=True):
    """Who is there at the start, and how they merge. Seconds, counts."""

    peers: int = 4
    stagger_s: float = 0.0
    """They start within this long of each other."""
    fragments: int = 1
    interval_s: float = 4.0
    step_s: float = 0.25
    slow: int = 0
    """So many of them, from number 0 on, take ``slow_factor`` times as long for a step."""
    slow_factor: float = 3.0
    outbound: int = 0
    """So many, the highest numbers, can only open streams: never home, no link to each other."""
    clock_skew_s: float = 0.0
    """Wall clocks are up to this wrong, either way."""
    codec: str = "int8"
    """Of hand-ins; "auto" leaves it to each peer's links, int8 at the richest."""
    rule: str = "mean"
    eta: float = 0.7
    mu: float = 0.5
    roster: bool = True
    """Each finds out by its own roster who is there; else all are told, a moment later."""
    mesh_max: int = MESH_MAX
    links: int = 0
    """With more peers than ``mesh_max`` each chooses so many neighbours; 0: there is no crowd."""
    pieces: bool = True
    """Whole anchors come in pieces from several donors; else all from one."""
    units: bool = True
    """They share work by cores of their own; else each step's sequence is the next number."""


class People(_Table, frozen=True, kw_only=True):
    """Volunteers who come and go during the chaos. Sessions have a heavy tail (Pareto)."""

    arrivals_per_min: float = 0.0
    day_s: float = 0.0
    """Length of a day, in which the arrivals swing; 0: they do not."""
    day_swing: float = 0.0
    """At noon so much more than the mean of arrivals comes, at night so much less; 0 to 1."""
    peers_max: int = 8
    session_s: float = 0.0
    """The shortest session; 0: nobody goes by itself."""
    tail: float = 1.5
    """Pareto's alpha: at 1.5 sessions have a mean of three times the shortest, and no variance."""
    crash: float = 1.0
    """How sessions end: weights of crash, leaving and freezing."""
    leave: float = 0.0
    freeze: float = 0.0
    freeze_s: float = 8.0
    returning: float = 0.5
    """Share of those gone that come back, after ``away_s`` on average."""
    away_s: float = 5.0
    with_disk: float = 0.7
    """Share of those coming back that still have their disk."""


class Event(_Table, frozen=True, kw_only=True):
    """One thing that happens at ``at_s``, or at the first ``upon`` after it."""

    at_s: float
    do: Action
    who: str = "any"
    """any, first, home, actor (whose ``upon`` it is), minority, half, all, newest, dead, or peer
    numbers."""
    upon: Moment = ""
    """merge: a home merges; sign: it has signed; commit: it announces; fetch: a payload was pulled
    from it; donate: it is asked for whole anchors; join: somebody asks for them."""
    times: int = 1
    """How often ``upon`` strikes."""
    skip: int = 0
    """So many moments pass first."""
    reach: int = 0
    """The commit of this moment is announced to so many peers only; 0: to all."""
    seconds: float = 0.0
    """How long it lasts; 0: until the healing."""
    count: int = 1
    """add: so many peers."""
    alone: bool = False
    """add: they reach only each other, until the healing or for ``seconds``."""
    one_way: bool = False
    """split: nothing passes from the chosen to the others; the other way is open."""
    quiet: bool = False
    """kill: the machine goes, too, and nothing tells the others."""
    disk: bool = True
    """restart: with the disk."""
    factor: float = 1000.0
    """claim: tokens claimed for one that was trained; speed: so many times as fast from now on."""
    beside: str = ""
    """add: peers that the newcomers share a side of the split with; '' means all."""


class Hold(_Table, frozen=True, kw_only=True):
    """What must hold. Zero or false: not asked."""

    merge_gap_intervals: float = 0.0
    """The longest time without a commit of a fragment, once the first is there ..."""
    merge_gap_detect_s: float = 4.0
    """... plus this: the roster's noticing (0.5 s from a stream's end, some more than 3 s of
    silence), an heir's question 0.5 s, its grace and its merge."""
    one_head_within_s: float = 20.0
    """After the healing: one head per fragment."""
    listed_within_versions: int = 0
    """At the end each live peer's newest listing is at most this old."""
    useful_within_s: float = 0.0
    """A newcomer is listed this soon after its start, or after the healing."""
    given_up_zero: bool = False
    """No live peer lost progress to a lineage that was left behind."""
    goodput_min: float = 0.0
    participation_min: float = 0.0
    coverage_min: float = 0.0
    majority_wins: bool = False
    """The head that most old members had at the healing is kept."""
    named_min: int = 0
    """So many peers are named for serving bad pieces."""
    donors_min: int = 0
    """So many peers served whole anchors."""
    covered: bool = True
    """Units that were open at the healing are listed some time later, and so is, at the end, what
    live learners did some time before, as the two that follow say."""
    covered_intervals: float = 9.0
    """Merge intervals after the healing within which the open units are listed, where the calm
    lasts so long: the swarm finds together (3), somebody is behind with them or they rest after a
    change of hands (4), listing (2)."""
    listed_intervals: float = 5.0
    """Merge intervals within which a live learner's work is listed; 0: not asked."""
    doubles_told_within_s: float = 0.0
    """A second machine with somebody's key is told so within this; the first one is not."""
    merges_min: int = 3
    """Commits of each fragment after the healing."""
    loss_max: float = 0.0
    """numeric: the agreed parameters' held-out loss at the end, nats a symbol."""
    loss_after_contact: float = 0.0
    """numeric: the loss of the first common heads after a split is at most so many times that of
    the better side just before the contact."""


class Scenario(_Table, frozen=True, kw_only=True):
    """One scenario with its options drawn."""

    title: str
    issue: int = 0
    """The number in the issue's list of what must hold."""
    known: str = ""
    """Why it is known not to hold yet; such a scenario is no part of `all`."""
    seconds: float = 40.0
    """Virtual seconds of chaos."""
    calm_s: float = 36.0
    """Virtual seconds after the healing."""
    swarm: Swarm = Swarm()
    weather: dict[str, float] = {}
    people: People = People()
    numeric: Numeric | None = None
    """A real model trains; absent: learning is played."""
    event: tuple[Event, ...] = ()
    hold: Hold = Hold()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scenario for one seed, and what was drawn for it."""

    name: str
    seed: int
    scenario: Scenario
    options: dict[str, Plain]
    weather: Weather


def names() -> list[str]:
    """The scenarios that come with the package."""
    folder = resources.files("dugnad.simulation") / "scenarios"
    found = (one.name for one in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def text_of(name: str) -> str:
    """The TOML text of a scenario of the package, or of the file that ``name`` is a path to."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise ScenarioError(f"{name} cannot be read: {fault}") from fault
    if name not in names():
        raise ScenarioError(f"there is no scenario {name!r}; there are: {', '.join(names())}")
    path = resources.files("dugnad.simulation") / "scenarios" / f"{name}.toml"
    return path.read_text("utf-8")


def draw(name: str, text: str, seed: int) -> Drawn:
    """The scenario in ``text`` with its options drawn for ``seed``; ScenarioError if it is bad."""
    try:
        raw: object = tomllib.loads(text)
        options: dict[str, Plain] = {}
        settled = _settle(raw, "", (name, seed), options)
        scenario = msgspec.convert(settled, Scenario)
        _judge(scenario)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ScenarioError) as fault:
        raise ScenarioError(f"scenario {name}: {fault}") from fault
    return Drawn(name, seed, scenario, options, Weather(**{"jitter": JITTER, **scenario.weather}))


def _settle(value: object, path: str, seeds: tuple[str, int], options: dict[str, Plain]) -> object:
    """``value`` with every `{low, high}` and every list of choices replaced by what was drawn."""
    match value:
        case {"low": low, "high": high, **rest} if not rest:
            options[path] = _between(low, high, _rng(seeds, path), path)
            return options[path]
        case dict():
            return {
                key: _settle(one, f"{path}.{key}" if path else key, seeds, options)
                for key, one in value.items()
            }
        case list() if value and all(isinstance(one, dict) for one in value) and path == "event":
            return [_settle(one, f"{path}{i}", seeds, options) for i, one in enumerate(value)]
        case list():
            if not value or not all(isinstance(one, Plain) for one in value):
                raise ScenarioError(f"`{path}` is not a list of numbers or words to choose from")
            options[path] = _rng(seeds, path).choice(value)
            return options[path]
    return value


def _between(low: object, high: object, rng: random.Random, path: str) -> Plain:
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low > high:
        raise ScenarioError(f"`{path}` needs numbers with low <= high")
    if isinstance(low, int) and isinstance(high, int):
        return rng.randint(low, high)
    return round(rng.uniform(low, high), 3)


def _rng(seeds: tuple[str, int], path: str) -> random.Random:
    text = f"{seeds[0]}/{seeds[1]}/{path}"
    return random.Random(hashlib.sha256(text.encode()).digest())


def _judge(scenario: Scenario) -> None:
    """What the types leave open."""
    known = {field.name for field in fields(Weather)}
    for key, value in scenario.weather.items():
        if key not in known:
            raise ScenarioError(f"`weather` has no key `{key}`; it has {', '.join(sorted(known))}")
        if value < 0 or (not key.endswith("_s") and key != "jitter" and value > 1):
            raise ScenarioError(f"`weather.{key}` is {value}, not a probability or a time")
    swarm = scenario.swarm
    if not 1 <= swarm.peers <= PEERS_MAX:
        raise ScenarioError(f"`swarm.peers` is {swarm.peers}; it must be 1 to {PEERS_MAX}")
    if not 0 <= swarm.outbound < swarm.peers:
        raise ScenarioError("`swarm.outbound` must leave one peer that others can reach")
    if min(swarm.interval_s, swarm.step_s, swarm.slow_factor) <= 0 or swarm.fragments < 1:
        raise ScenarioError("`swarm` has a time, a factor or a count that is not above zero")
    for key, value in ("seconds", scenario.seconds), ("calm_s", scenario.calm_s):
        if not 0 < value <= SECONDS_MAX:
            raise ScenarioError(f"`{key}` is {value}; it must be up to {SECONDS_MAX:.0f}")
    if not 0 <= scenario.people.day_swing <= 1 or scenario.people.day_s < 0:
        raise ScenarioError("`people.day_swing` must be 0 to 1, and `people.day_s` not below zero")
    if scenario.numeric is not None:
        try:
            scenario.numeric.check()
        except NumericError as fault:
            raise ScenarioError(str(fault)) from fault
    elif scenario.hold.loss_max or scenario.hold.loss_after_contact:
        raise ScenarioError("`hold` asks for a loss, and there is no `numeric` table")
    if len(scenario.event) > EVENTS_MAX:
        raise ScenarioError(f"more than {EVENTS_MAX} events")
    for number, one in enumerate(scenario.event):
        _judge_event(number, one, scenario.seconds)


def _judge_event(number: int, one: Event, seconds: float) -> None:
    where = f"`event` number {number + 1} ({one.do})"
    if not 0 <= one.at_s <= seconds:
        raise ScenarioError(f"{where}: `at_s` is {one.at_s}, outside the {seconds:.0f} s of chaos")
    if one.who == "actor" and not one.upon:
        raise ScenarioError(f'{where}: `who = "actor"` needs `upon`')
    words = {"any", "first", "home", "actor", "minority", "half", "all", "newest", "dead"}
    if one.who not in words and not all(part.isdigit() for part in one.who.split()):
        raise ScenarioError(f"{where}: `who` is {one.who!r}, neither a word for peers nor numbers")
    if one.factor <= 0:
        raise ScenarioError(f"{where}: `factor` must be above zero")
    if min(one.times, one.count) < 1 or min(one.skip, one.reach, one.seconds) < 0:
        raise ScenarioError(f"{where}: a count or a time is too small")
