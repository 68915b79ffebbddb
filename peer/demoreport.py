"""What the demo found out: the numbers, the verdict, and how both are printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, TextIO

import msgspec

from dugnad.peer.demoplan import UNIT_SEQUENCES
from dugnad.peer.leaderboard import print_board, read_board
from dugnad.peer.render import pairs
from dugnad.peer.views import Status, printable

SAMPLE_CHARS_MAX: Final = 400
COVERED_STATES: Final = ("listed", "settled")
"""Where a peer does not count its covered units itself."""


@dataclass(frozen=True, slots=True)
class SwarmFigures:
    """What the survivors' own accounts say at the end of training, each the most that any knows."""

    tokens: int
    merges: int
    units_covered: int
    units_lost: int
    units_twice: int
    longest_gap_s: float
    interval_s: float
    takeover_s: float | None
    versions: tuple[int, ...]
    peer_tokens_max: int


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the demo measured; what was not measured is None. Losses in nats a byte."""

    loss_before: float
    loss_after: float
    loss_control: float | None
    tokens: int
    merges: int
    units_covered: int
    units_lost: int
    units_twice: int
    longest_gap_s: float
    interval_s: float
    takeover_s: float | None
    join_to_merge_s: float | None
    digests_equal: bool
    left_behind: int
    seconds: float
    boards_equal: bool
    difference: str
    exit_codes: dict[str, int | None]
    versions: tuple[int, ...]
    control_tokens: int
    control_s: float
    tokens_per_s: float
    steps_per_merge: int
    peers: int
    minutes: float
    churn: bool
    control: bool
    seed: int
    sample: str
    leaderboard: dict[str, Any]  # JSON


def figures(statuses: Sequence[Status]) -> SwarmFigures:
    """One account from those of all survivors, at least one.

    Each counts from its own start, and the late peer has seen less: so the most of what is counted,
    and the median of the usual interval. What was trained twice, everybody knows of itself only.
    """
    takeovers = [s.last_takeover_s for s in statuses if s.last_takeover_s is not None]
    return SwarmFigures(
        tokens=max(s.swarm_tokens for s in statuses),
        merges=max(s.merges for s in statuses),
        units_covered=max(_covered(s.units) for s in statuses),
        units_lost=max(s.units.get("lost", s.units.get("given_up", 0)) for s in statuses),
        units_twice=_twice([s.units for s in statuses]),
        longest_gap_s=max(s.longest_gap_s for s in statuses),
        interval_s=median(s.interval_s for s in statuses),
        takeover_s=max(takeovers, default=None),
        versions=tuple(max(column) for column in zip(*(s.versions for s in statuses), strict=True)),
        peer_tokens_max=max(s.tokens for s in statuses),
    )


def failures(results: Results) -> list[str]:
    """Why the demo did not show what it should, a sentence each; empty when it did."""
    found = []
    if not results.digests_equal:
        found.append(f"the survivors do not hold the same model: {results.difference}")
    if results.units_lost:
        found.append(f"{_count(results.units_lost, 'unit')} of work got lost")
    if results.loss_control is not None and not results.loss_after < results.loss_control:
        found.append(
            f"the swarm's loss {results.loss_after:.3f} is not below {results.loss_control:.3f}, "
            "which one peer alone reaches"
        )
    for name, code in results.exit_codes.items():
        if code != 0:
            how = "did not end in time" if code is None else f"ended with exit code {code}"
            found.append(f"{name} was asked to leave and {how}")
    return found


def summary(results: Results) -> str:
    """The numbers as aligned rows."""
    r = results
    rows = [
        ("loss", f"{r.loss_before:.3f} before, {r.loss_after:.3f} after (nats a byte, held out)"),
        ("control", _control(r)),
        (
            "swarm",
            f"{r.tokens:,} tokens in {_count(r.merges, 'merge')}, "
            f"versions {' '.join(str(v) for v in r.versions)}",
        ),
        (
            "units",
            f"{r.units_covered} covered, {r.units_lost} lost, {r.units_twice} trained twice",
        ),
        (
            "merges",
            f"of a fragment every {r.interval_s:.2f} s, longest gap {r.longest_gap_s:.2f} s"
            + (f" ({r.longest_gap_s / r.interval_s:.1f} intervals)" if r.interval_s else ""),
        ),
    ]
    if r.churn:
        rows += [
            ("takeover", f"{_seconds(r.takeover_s)} from seeing the loss to claimed by others"),
            ("late peer", f"{_seconds(r.join_to_merge_s)} from its command to its first listing"),
        ]
    rows += [
        ("digests", "equal on every survivor" if r.digests_equal else f"DIFFER: {r.difference}"),
        ("board", "equal on every survivor" if r.boards_equal else "not equal yet"),
        ("left", f"{r.left_behind} processes or sockets left behind"),
        ("time", f"{r.seconds:.0f} s in all"),
    ]
    return pairs(rows)


def print_results(results: Results, stream: TextIO, now_ms: int) -> None:
    """Summary, leaderboard, sample and verdict."""
    stream.write("\n" + summary(results) + "\n\n")
    if results.leaderboard:
        print_board(read_board(results.leaderboard), stream, now_ms=now_ms)
    lines = [printable(line, SAMPLE_CHARS_MAX) for line in results.sample.splitlines()]
    stream.write("\nThe model writes:\n" + "".join(f"  {line}\n" for line in lines) + "\n")
    faults = failures(results)
    for fault in faults:
        stream.write(f"failed: {fault}\n")
    if not faults:
        stream.write("All went well, with nobody in charge.\n")


def results_json(results: Results) -> bytes:
    """The results as indented JSON with a line's end."""
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


def _covered(units: Mapping[str, int]) -> int:
    return units.get("covered", sum(units.get(state, 0) for state in COVERED_STATES))


def _twice(accounts: Sequence[Mapping[str, int]]) -> int:
    """Units trained twice, parts of units rounded up."""
    sequences = sum(units.get("twice_sequences", 0) for units in accounts)
    counted = max(units.get("twice", 0) for units in accounts)
    return max(counted, -(-sequences // UNIT_SEQUENCES))


def _control(results: Results) -> str:
    if results.loss_control is None:
        return "not asked for"
    gain = results.loss_control - results.loss_after
    return (
        f"{results.loss_control:.3f} by one peer alone on {results.control_tokens:,} tokens: "
        f"the exchange brought {gain:.3f}"
    )


def _seconds(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
