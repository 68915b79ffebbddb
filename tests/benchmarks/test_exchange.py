"""What the benchmark of the exchange makes of its measurements, and the tables it prints."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest
import short
from _exchangeplot import exchange_svg
from _fleet import Measured
from _gigabit import Lan
from _plainworker import PlainWorker
from exchange import ALONE, GLOO, HIVEMIND_8BIT, add_cell, fits, measure_all, show, summary
from short import PROGRAMS, lines

from dugnad.averaging import formats as fm
from dugnad.averaging.events import HandIn, Merge
from dugnad.averaging.fragments import MATRIX, Group
from dugnad.averaging.outer import bits_of
from dugnad.averaging.worker import FragmentRules, Progress
from dugnad.dht.ids import PeerId, RunId

OPTIONS = argparse.Namespace(peers=4, params=10_000_000, rounds=5)


def measured(seconds: float, cpu: float, memory: float = 100.0, wrong: float = 0.0) -> Measured:
    return Measured(seconds, seconds, seconds, cpu, 0.0, wrong, memory, memory)


def test_ratios_are_against_the_fastest_of_theirs_that_averaged_all() -> None:
    results = {
        "ours int8": measured(0.2, 0.6),
        ALONE: measured(0.1, 0.3),
        "hivemind float32": measured(1.2, 1.5, memory=200.0),
        "hivemind float16": measured(0.8, 1.0, memory=80.0, wrong=0.01),
        GLOO: measured(0.12, 0.1),
    }
    figures = summary(OPTIONS, results)
    assert figures["gb"] == pytest.approx(0.24)
    assert figures["cpu_s_per_gb"] == pytest.approx(2.5)
    assert figures["speedup_vs_hivemind"] == pytest.approx(6.0)
    assert figures["speedup_vs_hivemind_alone"] == pytest.approx(12.0)
    assert figures["ratio_vs_gloo"] == pytest.approx(0.6)
    assert figures["memory_vs_hivemind"] == pytest.approx(0.5)


def test_a_codec_of_theirs_that_clips_by_design_is_compared_until_it_misses_more() -> None:
    results = {
        "ours int8": measured(0.2, 0.6),
        "hivemind float16": measured(0.8, 1.0),
        HIVEMIND_8BIT: measured(0.6, 1.0, wrong=0.001),
    }
    assert summary(OPTIONS, results)["speedup_vs_hivemind"] == pytest.approx(3.0)
    results[HIVEMIND_8BIT] = measured(0.6, 1.0, wrong=0.01)
    assert summary(OPTIONS, results)["speedup_vs_hivemind"] == pytest.approx(4.0)


def test_a_goal_that_is_missed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show({"cpu_s_per_gb": 3.2, "ratio_vs_gloo_alone": 0.9, "peers": 4})
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "cpu_s_per_gb = 3.20   goal <= 3: NOT met",
        "ratio_vs_gloo_alone = 0.90   goal >= 0.5: met",
    ]


def test_the_plot_is_a_picture_with_every_row() -> None:
    drawn = exchange_svg("4 peers & more", {"ours int8": (0.2, 2.0), "gloo <x>": (0.1, 0.7)})
    root = ElementTree.fromstring(drawn)
    words = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"4 peers & more", "ours int8", "gloo <x>", "0.2", "0.7"} <= set(words)


def test_the_one_table_names_what_is_met_missed_and_missing() -> None:
    first = PROGRAMS[0]
    rows = lines(first, {"cpu_s_per_gb": 2.0, "ratio_vs_gloo": 0.1}, 12.3)
    assert [row.split()[-1] for row in rows if "cpu_s_per_gb " in row] == ["met"]
    assert [row.split()[-1] for row in rows if "ratio_vs_gloo " in row] == ["missed"]
    assert any(row.endswith("not found") for row in rows)
    assert rows[-1].endswith("took 12 s")
    assert lines(first, "failed with status 1", 3.0) == ["exchange.py    failed with status 1"]


@pytest.mark.slow
def test_a_program_that_takes_too_long_ends_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, mark = tmp_path / "endless.py", tmp_path / "ended"
    program.write_text(
        "import pathlib, sys, time\n"
        "try:\n    time.sleep(600)\n"
        f"finally:\n    pathlib.Path({str(mark)!r}).touch()\n"
    )
    monkeypatch.setattr(short, "HERE", tmp_path)
    monkeypatch.setattr(short, "LIMIT_S", 2.0)
    found = short.run(short.Short("endless.py", (), ()), tmp_path)
    assert found == "took more than 2 s"
    assert mark.exists()


def test_averaging_alone_gives_the_weighted_mean_at_home_and_elsewhere() -> None:
    n, run = 70_000, RunId(bytes(32))
    rules = FragmentRules(
        run, 0, (Group(0, n, MATRIX),), "mean", "int8", "int8", bits_of(1.0), bits_of(0.0)
    )
    ids = [PeerId(bytes([i]) * 32) for i in (1, 2)]
    workers = [PlainWorker(rules, one, n) for one in ids]
    vectors = np.random.default_rng(1).standard_normal((2, n)).astype(np.float32)
    done = Progress(10, 5, (), 20, True)
    action = HandIn(1, 0, fm.NO_DIGEST)
    made = [w.hand_in(action, v, done) for w, v in zip(workers, vectors, strict=True)]
    payload = workers[1].inbox[(ids[1], 1)].payload
    workers[0].keep(made[1], (), payload)
    merged = workers[0].merge(Merge(fm.NO_DIGEST, 1, ((ids[0], 1), (ids[1], 1))))
    header = fm.Header(
        format=fm.FORMAT,
        run=run,
        kind="merge",
        fragment=0,
        version=1,
        parent=merged.parent,
        home=ids[0],
        boot=0,
        time_ms=1,
        members_root=fm.NO_DIGEST,
        inputs_root=fm.NO_DIGEST,
        inputs_count=2,
        tokens_total=20,
        eta_bits=rules.eta_bits,
        mu_bits=rules.mu_bits,
        codec=merged.codec,
        payload_root=merged.payload_root,
        payload_bytes=merged.payload_bytes,
        theta_root=fm.NO_DIGEST,
        momentum_root=fm.NO_DIGEST,
        seqs_root=fm.NO_DIGEST,
    )
    workers[0].sealed(b"c" * 32, header)
    workers[1].advance(b"c" * 32, header, workers[0].commits[b"c" * 32].payload)
    assert workers[0].result.tobytes() == workers[1].result.tobytes()
    np.testing.assert_allclose(workers[0].result, vectors.mean(axis=0), atol=0.05)


SERVE = "import socket, sys; s = socket.create_server((sys.argv[1], 7)); s.accept()[0].send(b'x')"
CALL = (
    "import socket, sys, time\n"
    "until = time.monotonic() + 20\n"
    "while True:\n"
    "    try:\n"
    "        print(socket.create_connection((sys.argv[1], 7), 5).recv(1))\n"
    "        break\n"
    "    except OSError:\n"
    "        assert time.monotonic() < until\n"
    "        time.sleep(0.05)\n"
)


@pytest.mark.net
def test_a_lan_carries_bytes_between_peers_and_leaves_nothing() -> None:
    places = [Path(f"/run/netns/bench{os.getpid()}{tail}") for tail in ("", "-0", "-1")]
    with Lan(2, 100.0) as lan:
        assert all(place.exists() for place in places)
        server = subprocess.Popen([*lan.enter(1), sys.executable, "-c", SERVE, lan.address(1)])
        try:
            call = [*lan.enter(0), sys.executable, "-c", CALL, lan.address(1)]
            assert subprocess.run(call, capture_output=True, timeout=60).stdout.strip() == b"b'x'"
            assert server.wait(20) == 0
        finally:
            server.kill()
            server.wait()
    assert not any(place.exists() for place in places)


def test_parts_of_the_matrix_come_together_in_one_file(tmp_path: Path) -> None:
    options = argparse.Namespace(**vars(OPTIONS), json=str(tmp_path / "matrix.json"))
    add_cell(options, "4x10", {"ours int8": measured(0.2, 0.6)})
    figures = add_cell(options, "4x10", {GLOO: measured(0.1, 0.1)})
    assert figures["ratio_vs_gloo"] == pytest.approx(0.5)
    add_cell(options, "2x1", {GLOO: measured(0.3, 0.1)})
    add_cell(options, "2x1", {GLOO: measured(0.2, 0.1)})
    cells = json.loads(Path(options.json).read_text())["cells"]
    assert set(cells["4x10"]["results"]) == {"ours int8", GLOO}
    assert cells["2x1"]["results"][GLOO]["seconds"] == 0.2


def test_what_does_not_fit_the_memory_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: argparse.Namespace(available=20e9))
    cell = argparse.Namespace(peers=8, params=50_000_000)
    assert fits(cell, ALONE)
    assert not fits(cell, "ours int8")
    assert "ours int8: 8 peers of 50,000,000 are left out" in capsys.readouterr().out


def test_no_way_begins_after_the_time_of_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(peers=2, params=1_000_000, rounds=1, minutes=3.0)
    assert measure_all(options, [GLOO], until=0.0) == {}
    assert "left out: 3 minutes are over" in capsys.readouterr().out
