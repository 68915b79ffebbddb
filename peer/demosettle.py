"""Whether the survivors of the demo hold the same: heads of every fragment, and the leaderboard.

They go on merging while they are asked, one a moment after the other, so two snapshots are rarely
of the same instant. A fragment is agreed when all have shown the same digest for one version that
is no older than any was at the first look.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

SHOWN_MAX: Final = 4096
"""Snapshots kept: fifteen seconds, a few looks a second, 16 peers."""

FIELDS_TOLD: Final = 3
"""Fields named when leaderboards differ: the first ones show where to look."""
FIELD_CHARS_MAX: Final = 40
"""Of a field's value: a digest's or a key's beginning is enough."""


class Agreement:
    """Snapshots of `peers` (any names), and what all of them have shown."""

    def __init__(self, peers: Sequence[str]) -> None:
        self._peers = frozenset(peers)
        self._floor: list[int] | None = None
        self._heads: dict[tuple[int, int], dict[str, str]] = {}
        self._boards: dict[str, set[str]] = {}
        self._agreed: dict[int, int] = {}

    def show(self, looks: Mapping[str, tuple[Sequence[int], Sequence[str], str]]) -> None:
        """One round: versions, heads and board (as text) of those peers that answered."""
        if self._floor is None:
            if not self._peers <= looks.keys():
                return  # nobody may be forgotten when the bar is set
            fragments = zip(*(versions for versions, _, _ in looks.values()), strict=True)
            self._floor = [max(column) for column in fragments]
        for peer, (versions, heads, board) in looks.items():
            for fragment, shown in enumerate(zip(versions, heads, strict=True)):
                self._show_head(peer, fragment, *shown)
            if board and len(self._boards) < SHOWN_MAX:
                self._boards.setdefault(board, set()).add(peer)

    @property
    def digests_equal(self) -> bool:
        """Whether all have shown the same digest of every fragment."""
        return self._floor is not None and len(self._agreed) == len(self._floor)

    @property
    def board(self) -> str:
        """The latest leaderboard that all have shown, as text; '' when there is none."""
        common = [text for text, peers in self._boards.items() if peers >= self._peers]
        return common[-1] if common else ""

    def difference(self) -> str:
        """What is not agreed, as a sentence; '' when all is."""
        if self._floor is None:
            return "not every survivor answered"
        for fragment, floor in enumerate(self._floor):
            if fragment in self._agreed:
                continue
            for (at, version), heads in sorted(self._heads.items(), reverse=True):
                if at == fragment and len(set(heads.values())) > 1:
                    told = ", ".join(f"{p} {d[:8]}" for p, d in sorted(heads.items()))
                    return f"version {version} of fragment {fragment} differs: {told}"
            return f"not every survivor has reached version {floor} of fragment {fragment}"
        return ""

    def _show_head(self, peer: str, fragment: int, version: int, digest: str) -> None:
        assert self._floor is not None
        if version < self._floor[fragment] or len(self._heads) >= SHOWN_MAX:
            return
        shown = self._heads.setdefault((fragment, version), {})
        shown[peer] = digest  # the latest word counts: a fork may have been settled since
        if shown.keys() >= self._peers and len(set(shown.values())) == 1:
            self._agreed[fragment] = version


def board_difference(boards: Mapping[str, Mapping[str, object]]) -> str:
    """Where the leaderboards of peers (by name) differ, as a sentence; '' when they do not.

    They may be of different moments. The first few fields are told.
    """
    flat = {peer: dict(_fields("", board)) for peer, board in boards.items()}
    keys = sorted({key for fields in flat.values() for key in fields})
    parts = []
    for key in keys:
        shown = {peer: fields.get(key, "none") for peer, fields in flat.items()}
        if len(set(shown.values())) > 1:
            parts.append(f"{key} " + ", ".join(f"{peer}: {shown[peer]}" for peer in sorted(shown)))
    more = f"; and {len(parts) - FIELDS_TOLD} more" if len(parts) > FIELDS_TOLD else ""
    return "; ".join(parts[:FIELDS_TOLD]) + more


def _fields(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Path and text of each plain value in JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _fields(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _fields(f"{path}[{number}]", inner)
    else:
        yield path, str(value)[:FIELD_CHARS_MAX]
