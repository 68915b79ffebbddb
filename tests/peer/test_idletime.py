"""Who knows since when nobody touched this machine."""

from collections.abc import Sequence

import pytest

from dugnad.peer.idletime import (
    FOREVER_S,
    SOURCES,
    Source,
    idle_seconds,
    ioreg,
    logind,
    milliseconds,
)

NOW_US = 1_700_000_100_000_000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("t 61500\n", 61.5), ("(uint64 1500,)", 1.5), ("u 0", 0.0), ("250\n", 0.25), ("", None)],
)
def test_milliseconds_are_read_as_each_desktop_prints_them(
    text: str, seconds: float | None
) -> None:
    assert milliseconds(text, NOW_US) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("b true\nt 1700000000000000\n", 100.0),
        ("b false\nt 1700000000000000\n", 0.0),
        ("b true\nt 0\n", FOREVER_S),
        ("b true\n", None),
        ("nonsense", None),
    ],
)
def test_logind_says_idle_since_when(text: str, seconds: float | None) -> None:
    assert logind(text, NOW_US) == seconds


def test_the_least_of_several_macos_times_counts() -> None:
    text = '  "HIDIdleTime" = 5000000000\n | "HIDIdleTime" = 2500000000\n'
    assert ioreg(text, NOW_US) == 2.5
    assert ioreg("", NOW_US) is None


def test_the_first_that_answers_is_believed() -> None:
    sources = [Source(str(n), (str(n),), milliseconds) for n in range(3)]
    answers = {"1": "2000", "2": "9000"}

    def ask(command: Sequence[str]) -> str | None:
        return answers.get(command[0])

    assert idle_seconds(sources, ask) == (2.0, "1")


def test_when_none_answers_it_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle_seconds(SOURCES, lambda command: None) == (None, "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert idle_seconds() == (None, "")


def test_a_source_for_a_desktop_is_not_asked_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)

    def ask(command: Sequence[str]) -> str | None:
        asked.append(command[0])
        return None

    idle_seconds(SOURCES, ask)
    assert "xprintidle" not in asked
    assert all(command == "busctl" or command == "ioreg" for command in asked)
