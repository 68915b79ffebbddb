"""Reading this machine for the limits."""

import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dugnad.peer.limits import Limits, judge
from dugnad.peer.readings import (
    Reader,
    battery,
    cpu_temperature,
    folder_bytes,
    minute_of_week,
    programs,
    senses,
)


def test_this_machine_can_be_read_and_judged(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100_000))
    found = Reader(tmp_path, Limits()).read(traffic=7)
    assert 0 <= found.minute_of_week < 7 * 1440
    assert found.memory_used > 10_000_000  # this very process
    assert found.disk_used >= 100_000
    assert found.disk_total > found.disk_free > 0
    assert found.traffic == 7
    assert found.idle_s is None  # nobody asked
    judge(Limits(), found)


def test_the_week_begins_on_monday() -> None:
    assert minute_of_week(time.strptime("2026-11-30 00:01", "%Y-%m-%d %H:%M")) == 1
    assert minute_of_week(time.strptime("2026-12-01 18:00", "%Y-%m-%d %H:%M")) == 1440 + 1080


def test_a_running_program_is_known_by_its_name() -> None:
    me = psutil.Process().name()
    assert programs(psutil, (me.upper(), "no-such-program")) == {me.lower()}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        (SimpleNamespace(power_plugged=None, percent=5.0), None),
        (SimpleNamespace(power_plugged=False, percent=63), (True, 63.0)),
        (SimpleNamespace(power_plugged=True, percent=99), (False, 99.0)),
    ],
)
def test_a_battery_is_read(answer: object, expected: object) -> None:
    module = SimpleNamespace(sensors_battery=lambda: answer, Error=psutil.Error)
    assert battery(module) == expected


def test_the_hottest_believable_sensor_of_the_processor_counts() -> None:
    rows = [SimpleNamespace(current=c) for c in (51.0, 62.5, 65261.0)]
    module = SimpleNamespace(
        sensors_temperatures=lambda: {"nvme": [SimpleNamespace(current=80.0)], "k10temp": rows},
        Error=psutil.Error,
    )
    assert cpu_temperature(module) == 62.5
    assert cpu_temperature(SimpleNamespace(Error=psutil.Error)) is None  # macOS has no such call


def test_what_can_be_told_here_is_found_out(tmp_path: Path) -> None:
    assert senses(tmp_path / "not" / "yet").disk_total > 0


def test_a_folder_that_vanishes_has_no_bytes(tmp_path: Path) -> None:
    assert folder_bytes(tmp_path / "none") == 0
