"""The volunteer's limits as rules: (settings, readings, time) → allowed or not, and why.

Each rule is a pure function and looks at one setting. The first rule that says no is the reason
that people see, so the order is the order of how plain a reason is. A reading that is None was not
to be had on this machine; a rule that needs one says so, and such a setting is refused when it is
set (`faults`), not guessed at later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dugnad.peer.hours import WEEK_MINUTES, day_and_time, parse_hours

TEMPERATURE_BACK_C: Final = 5.0
"""A machine that was too hot goes on when it is this much cooler (volunteers.md 4.4)."""
TEMPERATURE_DWELL_S: Final = 60.0
"""And no sooner than this: fans and fever change in minutes."""
QUOTA_DAYS: Final = 30
MEMORY_MB_MIN: Final = 300
"""A learner that has loaded torch and nothing else takes about 280 MB (DESIGN.md section 5)."""
MEMORY_SHARE_DEFAULT: Final = 0.25
MEMORY_DEFAULT_MAX: Final = 4 << 30
FREE_SHARE_DEFAULT: Final = 0.1
FREE_DEFAULT_MAX: Final = 10_000_000_000
"""Unless set: keep a tenth of the disk free, at most 10 GB (a board's card has 32 in all)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that rules look at; names and units as in the configuration file."""

    hours: str = ""
    only_when_idle: bool = False
    idle_minutes: float = 3.0
    on_battery: bool = False
    gpu: str = "all"
    gpu_only_when_idle: str = "auto"
    pause_while: tuple[str, ...] = ()
    cpu_temperature_max: float = 90.0
    gpu_temperature_max: float = 85.0
    memory_mb: float = 0.0
    disk_gb: float = 5.0
    keep_free_gb: float = 0.0
    quota_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Readings:
    """The machine at one moment. None: it cannot be read here, or nobody asked for it."""

    minute_of_week: int
    now: float
    """Seconds on a clock that only goes forward."""
    idle_s: float | None = None
    """Since a person last touched keyboard or mouse. Our own load has no part in it."""
    on_battery: bool | None = None
    battery_percent: float | None = None
    cpu_c: float | None = None
    gpu_c: float | None = None
    programs: frozenset[str] = frozenset()
    """Lower-case names of the programs that run, of those that were asked for."""
    memory_used: int = 0
    """Bytes of this daemon and its children."""
    memory_total: int = 0
    disk_used: int = 0
    disk_free: int = 0
    disk_total: int = 0
    traffic: int = 0
    """Bytes up and down in the last QUOTA_DAYS."""
    leave_bytes: int = 0
    """What leaving still takes: a last hand-in, and what comes meanwhile."""
    trains_on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rule` is the name of the setting that says no ('' when none does), `since` when it began to.

    `reason` names the setting, its value and the reading: the words that people see everywhere.
    """

    allowed: bool
    rule: str = ""
    reason: str = ""
    since: float = 0.0


ALLOWED: Final = Verdict(True)
Rule = Callable[[Limits, Readings, Verdict], str]
"""Why not ('' when it may), given what was judged last: some rules let go later than they hold."""


def judge(limits: Limits, readings: Readings, last: Verdict = ALLOWED) -> Verdict:
    """Whether it may train now: the first rule that says no."""
    for name, rule in RULES.items():
        if why := rule(limits, readings, last):
            since = last.since if last.rule == name else readings.now
            return Verdict(False, name, f"{name} = {shown(limits, name)}: {why}", since)
    return ALLOWED


def shown(limits: Limits, name: str) -> str:
    """A setting's value as it is written."""
    value = getattr(limits, name)
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def hours_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Only at the hours that the owner gave."""
    hours = parse_hours(limits.hours)
    minute = readings.minute_of_week
    if hours.allow(minute):
        return ""
    return f"goes on {day_and_time(minute + hours.next_change(minute))}"


def battery_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not on battery, unless the owner wants it. A machine without one is on mains."""
    if limits.on_battery or not readings.on_battery:
        return ""
    percent = readings.battery_percent
    return "this machine runs on its battery" + (f", {percent:.0f} %" if percent else "")


def program_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not while a named program runs."""
    for name in limits.pause_while:
        if name.lower() in readings.programs:
            return f"{name} is running"
    return ""


def idle_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Only when nobody uses the machine."""
    return _in_use(limits, readings) if limits.only_when_idle else ""


def gpu_idle_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not on the GPU while somebody uses the machine. `auto`: only where that can be told."""
    if limits.gpu_only_when_idle == "false" or not readings.trains_on_gpu:
        return ""
    if limits.gpu_only_when_idle == "auto" and readings.idle_s is None:
        return ""
    return _in_use(limits, readings)


def cpu_temperature_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not above the processor's ceiling."""
    ceiling = limits.cpu_temperature_max
    return _too_hot(readings.cpu_c, ceiling, readings.now, "cpu_temperature_max", last)


def gpu_temperature_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not above the GPU's ceiling."""
    ceiling = limits.gpu_temperature_max
    return _too_hot(readings.gpu_c, ceiling, readings.now, "gpu_temperature_max", last)


def memory_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not with more memory than the owner gave (the learner is made smaller first)."""
    cap = memory_cap(limits, readings.memory_total)
    if not cap or readings.memory_used <= cap:
        return ""
    return f"{readings.memory_used / 1e6:,.0f} MB are used, {cap / 1e6:,.0f} MB are allowed"


def disk_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not with more disk than the owner gave."""
    cap = limits.disk_gb * 1e9
    if not cap or readings.disk_used <= cap:
        return ""
    return f"{readings.disk_used / 1e9:,.1f} GB are used"


def free_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not when the disk is nearly full, whoever filled it."""
    keep = keep_free(limits, readings.disk_total)
    if readings.disk_free >= keep:
        return ""
    return f"{readings.disk_free / 1e9:,.1f} GB are free, {keep / 1e9:,.1f} GB are to stay free"


def quota_rule(limits: Limits, readings: Readings, last: Verdict) -> str:
    """Not beyond the traffic that the owner gave for QUOTA_DAYS, what leaving takes included."""
    if not limits.quota_gb or readings.traffic + readings.leave_bytes < limits.quota_gb * 1e9:
        return ""
    return f"{readings.traffic / 1e9:,.1f} GB went up and down in {QUOTA_DAYS} days"


RULES: Final[dict[str, Rule]] = {
    "hours": hours_rule,
    "quota_gb": quota_rule,
    "on_battery": battery_rule,
    "pause_while": program_rule,
    "only_when_idle": idle_rule,
    "gpu_only_when_idle": gpu_idle_rule,
    "cpu_temperature_max": cpu_temperature_rule,
    "gpu_temperature_max": gpu_temperature_rule,
    "memory_mb": memory_rule,
    "disk_gb": disk_rule,
    "keep_free_gb": free_rule,
}
"""Each under the name of its setting, in the order in which they are asked."""


def memory_cap(limits: Limits, total: int) -> int:
    """Bytes that daemon and learner may take together; 0 when `total` is unknown and none is
    set."""
    if limits.memory_mb:
        return round(limits.memory_mb * 1e6)
    return min(MEMORY_DEFAULT_MAX, round(MEMORY_SHARE_DEFAULT * total))


def keep_free(limits: Limits, total: int) -> float:
    """Bytes of the disk that are to stay free."""
    if limits.keep_free_gb:
        return limits.keep_free_gb * 1e9
    return min(FREE_DEFAULT_MAX, FREE_SHARE_DEFAULT * total)


@dataclass(frozen=True, slots=True)
class Senses:
    """What can be told on this machine at all."""

    idle: bool
    battery: bool
    cpu_temperature: bool
    disk_total: int
    """Of the disk with the data folder, bytes."""


def faults(limits: Limits, senses: Senses) -> list[str]:
    """What is wrong with these settings on this machine: each a sentence. Nothing is guessed at
    later: a rule that cannot be kept is refused now."""
    found = []
    if limits.only_when_idle and not senses.idle:
        found.append(
            "only_when_idle = true: whether somebody uses this machine cannot be told on it"
        )
    if limits.gpu_only_when_idle == "true" and limits.gpu != "none" and not senses.idle:
        found.append(
            "gpu_only_when_idle = true: whether somebody uses this machine cannot be told on it"
        )
    if why := _never(limits, senses):
        found.append(f"{why}: with these settings it will run 0 hours a week")
    return found


def hours_a_week(limits: Limits, senses: Senses) -> float:
    """At most so many hours a week can be worked with these settings."""
    return 0.0 if _never(limits, senses) else parse_hours(limits.hours).minutes / 60


def _never(limits: Limits, senses: Senses) -> str:
    """The settings that together leave no time at all ('' when there is some)."""
    if any("dugnad" in name.lower() for name in limits.pause_while):
        return "pause_while names dugnad itself"
    if limits.only_when_idle and limits.idle_minutes >= WEEK_MINUTES:
        return f"idle_minutes = {limits.idle_minutes:g} is a week or more"
    if limits.keep_free_gb * 1e9 >= senses.disk_total > 0:
        total = senses.disk_total / 1e9
        return f"keep_free_gb = {limits.keep_free_gb:g} is more than the disk has, {total:,.1f} GB"
    if 0.0 < limits.memory_mb < MEMORY_MB_MIN:
        return f"memory_mb = {limits.memory_mb:g} is less than torch alone takes, {MEMORY_MB_MIN}"
    return ""


def warnings(limits: Limits, senses: Senses) -> list[str]:
    """What an owner should know: not wrong, and not what they may expect."""
    found = []
    if not senses.battery and not limits.on_battery:
        found.append("no battery is seen: this machine counts as on mains")
    if not senses.cpu_temperature:
        found.append("cpu_temperature_max: the temperature cannot be read on this machine")
    if limits.gpu_only_when_idle == "auto" and limits.gpu != "none" and not senses.idle:
        found.append("gpu_only_when_idle = auto: without effect, since idleness cannot be told")
    return found


def _in_use(limits: Limits, readings: Readings) -> str:
    if readings.idle_s is None:
        return "whether somebody uses this machine cannot be told"
    wanted = limits.idle_minutes * 60
    if readings.idle_s >= wanted:
        return ""
    return f"somebody used this machine {_ago(readings.idle_s)} ago, {_ago(wanted)} are wanted"


def _too_hot(degrees: float | None, ceiling: float, now: float, name: str, last: Verdict) -> str:
    if degrees is None or not ceiling:
        return ""
    if last.rule == name:  # let go later than it holds, or it goes on and off with the fan
        cooled = degrees < ceiling - TEMPERATURE_BACK_C
        if cooled and now - last.since >= TEMPERATURE_DWELL_S:
            return ""
        return f"{degrees:.0f} °C now, goes on below {ceiling - TEMPERATURE_BACK_C:.0f} °C"
    return f"{degrees:.0f} °C" if degrees > ceiling else ""


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
