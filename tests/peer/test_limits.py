"""The volunteer's limits: every rule as a truth table, and what is wrong with settings."""

import itertools
from dataclasses import replace

import pytest

from dugnad.peer.limits import (
    ALLOWED,
    RULES,
    TEMPERATURE_DWELL_S,
    Limits,
    Readings,
    Senses,
    Verdict,
    faults,
    hours_a_week,
    judge,
    keep_free,
    memory_cap,
    warnings,
)

QUIET = Readings(
    minute_of_week=600,
    now=1000.0,
    idle_s=3600.0,
    on_battery=False,
    memory_total=64 << 30,
    disk_free=10**12,
    disk_total=2 * 10**12,
)
"""A machine on which nothing stands against training."""
SENSES = Senses(idle=True, battery=True, cpu_temperature=True, disk_total=10**12)
GB = 10**9


def allowed(limits: Limits, readings: Readings, rule: str) -> bool:
    """What one rule says, and that the whole judgement agrees and names it."""
    why = RULES[rule](limits, readings, ALLOWED)
    verdict = judge(limits, readings)
    if why:
        assert verdict.rule == rule
        assert verdict.reason.startswith(f"{rule} = ")
        assert verdict.reason.endswith(why)
    else:
        assert verdict == ALLOWED
    return not why


def test_with_the_defaults_a_quiet_machine_may_train() -> None:
    assert judge(Limits(), QUIET) == ALLOWED


@pytest.mark.parametrize(("hours", "minute", "may"), [
    ("", 600, True),
    ("mon 9-11", 600, True),
    ("mon 11-12", 600, False),
    ("tue 9-11", 600, False),
])  # fmt: skip
def test_hours(hours: str, minute: int, may: bool) -> None:
    readings = replace(QUIET, minute_of_week=minute)
    assert allowed(Limits(hours=hours), readings, "hours") == may


def test_outside_of_the_hours_the_next_ones_are_named() -> None:
    verdict = judge(Limits(hours="tue 9-11"), QUIET)
    assert verdict.reason == "hours = tue 9-11: goes on tue 09:00"


@pytest.mark.parametrize(
    ("setting", "reading", "may"),
    [
        (False, None, True),
        (False, False, True),
        (False, True, False),
        (True, None, True),
        (True, False, True),
        (True, True, True),
    ],
)
def test_battery(setting: bool, reading: bool | None, may: bool) -> None:
    readings = replace(QUIET, on_battery=reading, battery_percent=63.0)
    assert allowed(Limits(on_battery=setting), readings, "on_battery") == may


@pytest.mark.parametrize(
    ("setting", "idle_s", "may"),
    [
        (False, None, True),
        (False, 0.0, True),
        (True, None, False),
        (True, 0.0, False),
        (True, 179.9, False),
        (True, 180.0, True),
    ],
)
def test_only_when_idle(setting: bool, idle_s: float | None, may: bool) -> None:
    readings = replace(QUIET, idle_s=idle_s)
    assert allowed(Limits(only_when_idle=setting), readings, "only_when_idle") == may


@pytest.mark.parametrize(
    ("setting", "on_gpu", "idle_s"),
    list(itertools.product(["auto", "true", "false"], [False, True], [None, 0.0, 180.0])),
)
def test_gpu_only_when_idle(setting: str, on_gpu: bool, idle_s: float | None) -> None:
    readings = replace(QUIET, idle_s=idle_s, trains_on_gpu=on_gpu)
    may = (
        not on_gpu
        or setting == "false"
        or (idle_s is None and setting == "auto")
        or (idle_s is not None and idle_s >= 180.0)
    )
    assert allowed(Limits(gpu_only_when_idle=setting), readings, "gpu_only_when_idle") == may


@pytest.mark.parametrize(
    ("names", "runs", "may"),
    [((), {"game"}, True), (("Game",), set(), True), (("Game",), {"game"}, False)],
)
def test_pause_while(names: tuple[str, ...], runs: set[str], may: bool) -> None:
    readings = replace(QUIET, programs=frozenset(runs))
    assert allowed(Limits(pause_while=names), readings, "pause_while") == may


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("ceiling", "degrees", "may"),
    [(80.0, None, True), (80.0, 80.0, True), (80.0, 80.1, False), (0.0, 150.0, True)],
)
def test_temperature(kind: str, ceiling: float, degrees: float | None, may: bool) -> None:
    name = f"{kind}_temperature_max"
    if kind == "cpu":
        limits, readings = Limits(cpu_temperature_max=ceiling), replace(QUIET, cpu_c=degrees)
    else:
        limits, readings = Limits(gpu_temperature_max=ceiling), replace(QUIET, gpu_c=degrees)
    assert allowed(limits, readings, name) == may


@pytest.mark.parametrize(
    ("degrees", "after_s", "may"),
    [(75.1, 500.0, False), (74.9, 59.0, False), (74.9, 60.0, True), (79.0, 500.0, False)],
)
def test_a_hot_machine_goes_on_when_it_is_cool_and_some_time_has_passed(
    degrees: float, after_s: float, may: bool
) -> None:
    limits = Limits(cpu_temperature_max=80.0)
    hot = judge(limits, replace(QUIET, cpu_c=81.0))
    assert hot.since == QUIET.now
    later = judge(limits, replace(QUIET, cpu_c=degrees, now=QUIET.now + after_s), hot)
    assert later.allowed == may
    assert may or later.since == QUIET.now
    assert TEMPERATURE_DWELL_S == 60.0


@pytest.mark.parametrize(
    ("cap", "used", "may"), [(500.0, 500 * 10**6, True), (500.0, 500 * 10**6 + 1, False)]
)
def test_memory(cap: float, used: int, may: bool) -> None:
    assert allowed(Limits(memory_mb=cap), replace(QUIET, memory_used=used), "memory_mb") == may


def test_memory_is_a_quarter_and_at_most_four_gigabytes_unless_set() -> None:
    assert memory_cap(Limits(), 8 << 30) == 2 << 30
    assert memory_cap(Limits(), 64 << 30) == 4 << 30
    assert memory_cap(Limits(memory_mb=700.0), 8 << 30) == 700_000_000


@pytest.mark.parametrize(("cap", "used", "may"), [(5.0, 5 * GB, True), (5.0, 5 * GB + 1, False)])
def test_disk(cap: float, used: int, may: bool) -> None:
    assert allowed(Limits(disk_gb=cap), replace(QUIET, disk_used=used), "disk_gb") == may


@pytest.mark.parametrize(
    ("setting", "free", "total", "may"),
    [
        (0.0, 10 * GB, 500 * GB, True),
        (0.0, 10 * GB - 1, 500 * GB, False),
        (0.0, 3 * GB, 30 * GB, True),
        (2.0, 2 * GB - 1, 30 * GB, False),
    ],
)
def test_keep_free(setting: float, free: int, total: int, may: bool) -> None:
    readings = replace(QUIET, disk_free=free, disk_total=total)
    assert allowed(Limits(keep_free_gb=setting), readings, "keep_free_gb") == may
    assert keep_free(Limits(), 30 * GB) == 3 * GB


@pytest.mark.parametrize(
    ("quota", "traffic", "may"), [(0.0, 10**15, True), (1.0, GB - 1, True), (1.0, GB, False)]
)
def test_quota(quota: float, traffic: int, may: bool) -> None:
    assert allowed(Limits(quota_gb=quota), replace(QUIET, traffic=traffic), "quota_gb") == may


def test_leaving_fits_into_the_quota() -> None:
    near = replace(QUIET, traffic=GB - 100, leave_bytes=99)
    assert allowed(Limits(quota_gb=1.0), near, "quota_gb")
    assert not allowed(Limits(quota_gb=1.0), replace(near, leave_bytes=100), "quota_gb")


def test_the_plainest_of_several_reasons_is_shown() -> None:
    readings = replace(QUIET, on_battery=True, cpu_c=99.0)
    assert judge(Limits(hours="tue 9-10"), readings).rule == "hours"
    assert judge(Limits(), readings).rule == "on_battery"
    assert judge(Limits(on_battery=True), readings).rule == "cpu_temperature_max"


def test_a_reason_names_the_setting_its_value_and_the_reading() -> None:
    verdict = judge(Limits(), replace(QUIET, on_battery=True, battery_percent=63.0))
    assert verdict == Verdict(
        False,
        "on_battery",
        "on_battery = false: this machine runs on its battery, 63 %",
        QUIET.now,
    )


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(pause_while=("Dugnad",)), "pause_while names dugnad"),
        (Limits(only_when_idle=True, idle_minutes=20_000.0), "idle_minutes = 20000"),
        (Limits(keep_free_gb=1001.0), "keep_free_gb = 1001"),
        (Limits(memory_mb=100.0), "memory_mb = 100"),
    ],
)
def test_settings_that_leave_no_time_are_said(limits: Limits, said: str) -> None:
    (fault,) = faults(limits, SENSES)
    assert said in fault
    assert fault.endswith("with these settings it will run 0 hours a week")
    assert hours_a_week(limits, SENSES) == 0.0


def test_an_option_that_cannot_be_kept_here_is_refused() -> None:
    blind = replace(SENSES, idle=False)
    assert faults(Limits(), blind) == []
    assert "cannot be told" in faults(Limits(only_when_idle=True), blind)[0]
    assert "cannot be told" in faults(Limits(gpu_only_when_idle="true"), blind)[0]
    assert faults(Limits(gpu_only_when_idle="true", gpu="none"), blind) == []
    assert any("gpu_only_when_idle" in one for one in warnings(Limits(), blind))


def test_the_hours_of_a_week_are_counted() -> None:
    assert hours_a_week(Limits(), SENSES) == 168.0
    assert hours_a_week(Limits(hours="mon-fri 18-24"), SENSES) == 30.0
    assert faults(Limits(hours="mon-fri 18-24"), SENSES) == []
