"""What a join lists, so that the work of both sides counts once (DESIGN.md rule 11).

Each contribution since the fork has a maker, and each maker settled its contributions on the side
it was on: what that side lists counts, what it let pass is back in the maker's residual and comes
again in a later contribution. So for every maker its own side decides. Which side that is, follows
from the head that its newest listed contribution was made on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.formats import JOIN_INPUTS_MAX, NO_DIGEST, Input
from dugnad.averaging.join import ALPHA_MAX, AMENDED, Key, counts
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.outer import bits_of
from dugnad.dht.records import encode

JOIN_PIECES_MAX: Final = 1 << 15
"""Unit pieces of one join, as of one merge: half a megabyte."""
JOIN_BYTES_MAX: Final = 1 << 20
"""Bytes of all inputs, about three thousand: a join has to fit into one message twice, as the
checkpoint and as the first commit after it."""


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """What the join of ``other`` says."""

    other: bytes
    alpha_bits: int
    inputs: tuple[Input, ...]
    left_out: int
    """Contributions of the other side that did not fit: their work is given up."""


def plan(lineage: Lineage, head: Node, other: Node) -> JoinPlan | None:
    """The join of ``other`` on ``head``; None where nothing is to be joined, or where the fork is
    too far back to be known."""
    theirs = lineage.unjoined(other, head)
    if lineage.fork_point(head, other) is None or not theirs:
        return None
    here, there = _entries(lineage.unjoined(head, other)), _entries(theirs)
    sides = _sides(lineage, head, other, (*here.values(), *there.values()))
    listed = lineage.listings(head)
    amended: dict[Key, Input] = {}
    new: list[Input] = []
    for key, one in there.items():  # newest first
        made, mine = one.contribution, listed.get(key)
        if mine is not None and counts(mine):
            if sides.get(made.peer) is other and mine.clip != one.clip:
                amended[key] = _amendment(mine, one.clip)
        elif sides.get(made.peer) is not head or not _came_back(lineage, head, one):
            new.append(Input(made, one.pieces, one.clip, ()))
    for key, one in here.items():
        elsewhere = key not in there and sides.get(one.contribution.peer) is other
        if elsewhere and _came_back(lineage, other, one):
            amended[key] = _amendment(one, 0.0)
    fitting = _fitting(list(amended.values()), new)
    left_out = len(amended) + len(new) - len(fitting)
    if not fitting:
        return None
    rows = sorted(fitting, key=lambda one: (one.contribution.peer, one.contribution.seq))
    return JoinPlan(other.digest, _alpha(lineage, head, other), tuple(rows), left_out)


def _entries(nodes: Sequence[Node]) -> dict[Key, Input]:
    """What these commits (newest first) list and still counts after all of them; newest first."""
    found: dict[Key, Input] = {}
    for node in nodes:
        for key, one in node.listed.items():
            found.setdefault(key, one)
    return {key: one for key, one in found.items() if counts(one)}


def _sides(
    lineage: Lineage, head: Node, other: Node, entries: Iterable[Input]
) -> dict[bytes, Node]:
    """Maker -> the head of the side on which its newest contribution since the fork was made.

    Who has none on either side is left out: what of its work is listed was under way at the fork.
    """
    heads = {node.digest: head for node in lineage.beyond(head, other)}
    heads |= {node.digest: other for node in lineage.beyond(other, head)}
    newest: dict[bytes, tuple[int, Node]] = {}
    for one in entries:
        made = one.contribution
        side = heads.get(made.base_digest)
        if side is not None and made.seq > newest.get(made.peer, (-1, side))[0]:
            newest[made.peer] = (made.seq, side)
    return {peer: side for peer, (_, side) in newest.items()}


def _came_back(lineage: Lineage, head: Node, one: Input) -> bool:
    """Whether the maker of a contribution took all of it back when it stood at ``head``."""
    made = one.contribution
    return lineage.returned_share(head, (made.peer, made.seq), made.base) == 1.0


def _amendment(one: Input, clip: float) -> Input:
    return Input(one.contribution, one.pieces, clip, (), AMENDED)


def _fitting(first: Sequence[Input], then: Sequence[Input]) -> list[Input]:
    """As many of the inputs as one join can list, in the order given."""
    chosen: list[Input] = []
    pieces = size = 0
    for one in (*first, *then):
        pieces, size = pieces + len(one.pieces), size + len(encode(one))
        full = len(chosen) >= JOIN_INPUTS_MAX or pieces > JOIN_PIECES_MAX
        if full or size > JOIN_BYTES_MAX:
            break
        chosen.append(one)
    return chosen


def _alpha(lineage: Lineage, head: Node, other: Node) -> int:
    """The share of the other side as float32 bits: its squared weight of both squared weights.

    Weight is what decides between heads, too: tokens of members of the forks, capped by their
    classes. So newcomers on either side move nothing by their claims. Squared, because the lighter
    side is not only noisier but also behind: between halves this is the weighted average, and one
    peer's state among many costs nothing (by plain weights the loss was 1 % higher; simulated).
    """
    ours, theirs = lineage.beyond(head, other), lineage.beyond(other, head)
    apart = {node.digest for node in (*ours, *theirs)}
    forks = (lineage.get(node.parent) for node in (*ours, *theirs) if node.parent not in apart)
    voters = {row.peer for fork in forks if fork is not None for row in fork.members}
    here, there = _weight(lineage, ours, voters), _weight(lineage, theirs, voters)
    share = there**2 / (here**2 + there**2) if there else 0.0
    return bits_of(min(share, ALPHA_MAX))


def _weight(lineage: Lineage, nodes: Iterable[Node], voters: set[bytes]) -> int:
    """Tokens of voters in these commits; those of a join whose other side is known are there."""
    total = 0
    for node in nodes:
        record = node.record
        other = NO_DIGEST if record is None else record.header.other
        if lineage.get(other) is None:
            total += sum(n for peer, n in node.weights.items() if not voters or peer in voters)
    return total
