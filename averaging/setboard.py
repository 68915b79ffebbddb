"""The board of a set of commits: credit folded over the lineages that the set itself tells.

Two readers of one set print the same bytes, whoever they are and whatever else they have heard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dugnad.averaging.board import FORMULA, Board
from dugnad.averaging.committree import Start, tell
from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.credit import CreditFold
from dugnad.averaging.foldstate import FoldState, FragmentState
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.lineage import LineageRules

PAGE: Final = 64
"""Commits handed to a fold at once."""


def fold_from(
    rules: CreditRules, starts: Sequence[Start], base: FoldState | None = None
) -> CreditFold:
    """A fold to which the commits above ``starts`` (one a fragment, ascending) can be applied.

    Of what lies below a start above version 0 it knows what ``base`` tells that stands there, or
    nothing: then it is neither credited nor known to be covered.
    """
    empty = tuple(
        FragmentState(
            fragment=p,
            version=start.version,
            digest=start.digest if start.version else b"",
            time_ms=0,
            receipts=0,
            refused=0,
            done=0,
            masks=(),
            tallies=(),
            waiting_home=b"",
            waiting_tokens=0,
            waiting_days=(),
        )
        for p, start in enumerate(starts)
    )
    held = {(row.version, row.digest): row for row in base.fragments if row.version} if base else {}
    rows = tuple(held.get((row.version, row.digest), row) for row in empty)
    return CreditFold.restore(rules, FoldState(FORMULA, rules.run, rows))


def board_of(
    rules: CreditRules, lineages: Sequence[LineageRules], commits: Mapping[bytes, CommitRecord]
) -> Board:
    """The board of a set in memory; what of the set does not fit is left out. The signatures are
    to hold already. ``lineages``: the rules of all fragments, ascending.
    """
    told = []
    for one in lineages:
        mine = {d: c for d, c in commits.items() if c.header.fragment == one.fragment}
        told.append(tell(one, mine))
    fold = fold_from(rules, [start for start, _, _ in told])
    for fragment, (_, chain, _) in enumerate(told):
        for at in range(0, len(chain), PAGE):
            fold.follow(fragment, [(name, commits[name]) for name in chain[at : at + PAGE]])
    return fold.board()
