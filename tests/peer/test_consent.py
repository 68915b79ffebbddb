"""What taking part will use, and the question."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dugnad.dht.identity import Identity
from dugnad.peer import consent
from dugnad.peer.config import Settings
from dugnad.peer.consent import (
    agree,
    check_limits,
    check_machine,
    disk_free,
    disk_need,
    memory_available,
    offer,
)
from dugnad.peer.corpus import SHARD_BYTES, DataIndex
from dugnad.peer.errors import UserError
from dugnad.peer.manifest import Manifest, build_manifest, memory_need
from dugnad.peer.paths import Home
from dugnad.peer.runfile import default_run

ROWS = [("processor", "1 of 2 cores")]
SETTINGS = Settings(threads=1, cpu_share=0.5)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """The example run's manifest, over one shard of text."""
    index = DataIndex(SHARD_BYTES, (b"1" * 32,))
    return build_manifest(default_run(), Identity.ephemeral(b"o" * 32), index, created_ms=1)


def text_of(rows: Sequence[tuple[str, str]], what: str) -> str:
    """The text of one row."""
    return dict(rows)[what]


def test_the_offer_names_each_thing_that_is_used(manifest: Manifest, home: Home) -> None:
    rows = offer(manifest, SETTINGS, home)
    assert "1 of" in text_of(rows, "processor")
    assert "50% of the time" in text_of(rows, "processor")
    assert f"{memory_need(manifest).total / 1e6:,.1f} MB" in text_of(rows, "memory")
    assert str(home.root) in text_of(rows, "disk")
    assert "every 24 steps" in text_of(rows, "network")
    assert "MB" in text_of(rows, "to fetch")
    assert text_of(rows, "licence") == "CC0-1.0"


def test_without_a_manifest_the_limits_are_named(home: Home) -> None:
    assert [what for what, _ in offer(None, SETTINGS, home)] == [
        "processor",
        "memory",
        "disk",
        "network",
        "roles",
        "GPU",
        "at most",
        "when",
        "not above",
        "to change",
    ]


def test_every_limit_is_shown_before_the_first_run(home: Home) -> None:
    settings = Settings(
        hours="sat 0-24", only_when_idle=True, pause_while=("game",), quota_gb=30.0, gpu="none"
    )
    rows = offer(None, settings, home)
    assert text_of(rows, "GPU") == "not used"
    assert text_of(rows, "at most") == "up 10 Mbit/s, down 20 Mbit/s, 30 GB in 30 days"
    when = text_of(rows, "when")
    assert when == ("sat 0-24, only after 3 min without use, not on battery, not while game runs")


def test_limits_that_cannot_be_kept_here_are_refused_before_anything_starts(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_limits(Settings(), home)
    with pytest.raises(UserError, match="0 hours a week") as caught:
        check_limits(Settings(keep_free_gb=1e6), home)
    assert caught.value.exit_code == 32


def test_yes_prints_and_does_not_ask(capsys: pytest.CaptureFixture[str]) -> None:
    agree(ROWS, yes=True)
    assert "processor  1 of 2 cores" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["y", " YES "])
def test_yes_is_an_answer(answer: str) -> None:
    agree(ROWS, yes=False, ask=lambda _: answer)


@pytest.mark.parametrize("answer", ["", "n", "yesterday"])
def test_anything_else_starts_nothing(answer: str) -> None:
    with pytest.raises(UserError) as caught:
        agree(ROWS, yes=False, ask=lambda _: answer)
    assert (caught.value.number, caught.value.exit_code) == ("E004", 1)


def test_an_end_of_input_is_a_no() -> None:
    def closed(_: str) -> str:
        raise EOFError

    with pytest.raises(UserError, match="E004"):
        agree(ROWS, yes=False, ask=closed)


def test_without_a_terminal_the_fix_is_named() -> None:
    with pytest.raises(UserError) as caught:  # pytest's standard input is no terminal
        agree(ROWS, yes=False)
    assert (caught.value.number, caught.value.exit_code) == ("E003", 2)
    assert "--yes" in caught.value.fix


def test_too_little_memory_or_disk_is_refused_with_both_numbers(
    manifest: Manifest, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_machine(manifest, home)
    monkeypatch.setattr(consent, "disk_free", lambda _: 1_000_000)
    with pytest.raises(UserError, match=r"needs \d+\.\d MB of disk, .* has 1\.0 MB free") as disk:
        check_machine(manifest, home)
    monkeypatch.setattr(consent, "memory_available", lambda: 1_000_000)
    with pytest.raises(UserError, match="this machine has 1 MB free") as memory:
        check_machine(manifest, home)
    assert (disk.value.exit_code, memory.value.exit_code) == (17, 21)


def test_a_container_may_have_less_memory_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "_CGROUP", tmp_path)
    machine = memory_available()
    assert machine > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory_available() == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_available() > 4000


def test_free_disk_is_known_before_the_folder_exists(manifest: Manifest, tmp_path: Path) -> None:
    assert disk_free(Home(tmp_path / "not" / "yet")) > 0
    assert disk_need(manifest) > 2 * manifest.data.index.size
