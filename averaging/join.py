"""What a join may say: the commit that takes in a lineage which went on alone (DESIGN.md rule 11).

A join is built on the head of the lineage that goes on and names the head of the *other* one. It
lists the other's inputs as its own, so that tables, receipts, coverage and credit follow from it
as from any commit, and moves the anchors by a share alpha of the way to the other's. Of an input
that its own lineage lists already it may say what became of it on the other side instead: such an
*amendment* earns nothing, and its clip factor replaces that of the first listing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from dugnad.averaging.formats import NO_DIGEST, Header, Input
from dugnad.averaging.outer import OuterError, bits_of, float_of

MERGE: Final = "merge"
JOIN: Final = "join"
KINDS: Final = (MERGE, JOIN)
"""Kinds of commits that this version reads."""
ALPHA_MAX: Final = 0.5
"""The lighter side never moves the anchors further than half of the way."""
ETA_BITS: Final = bits_of(1.0)
"""A join's payload is the step itself, ..."""
MU_BITS: Final = bits_of(0.0)
"""... and the momentum stays as it was."""
CODECS: Final = ("float16", "float32")
"""A join's payload is not coarser than half precision: nobody's residual keeps what it loses."""
AMENDED: Final = "its maker settled it differently on the other side"
"""The refusal that an amendment carries."""

Key = tuple[bytes, int]


def counts(one: Input) -> bool:
    """Whether what a lineage says of a contribution leaves anything of it counted."""
    return not one.refusal or one.clip > 0.0


def header_fault(header: Header, covered: Container[bytes]) -> str:
    """Why a header of either kind contradicts itself or its lineage, or ''.

    ``covered`` holds the commits whose inputs the parent's lineage lists already. The rates of a
    merge are the run's business.
    """
    if header.kind == MERGE:
        lone = header.other == NO_DIGEST and not header.alpha_bits
        return "" if lone else "it is a merge and names another head"
    if header.kind != JOIN:
        return f"commits of kind {header.kind!r} are not read by this version"
    if header.other == NO_DIGEST:
        return "it is a join and names no other head"
    if header.other in covered:
        return "it joins what its lineage lists already"
    if (header.eta_bits, header.mu_bits) != (ETA_BITS, MU_BITS):
        return "it is a join with outer rates other than 1 and 0"
    if header.codec not in CODECS:
        return f"it is a join whose payload is in {header.codec!r}"
    try:
        alpha = float_of(header.alpha_bits)
    except OuterError as fault:
        return f"its share of the other side is {fault.reason}"
    return "" if 0.0 <= alpha <= ALPHA_MAX else "its share of the other side is not 0 to a half"


def inputs_fault(inputs: tuple[Input, ...], listed: Mapping[Key, Input]) -> str:
    """Why a join on a lineage that lists ``listed`` may not list these, or ''.

    Where the chain is not known far down, what it lists cannot be asked about; then an input may
    count twice, as the home's word has it.
    """
    for one in inputs:
        before = listed.get((one.contribution.peer, one.contribution.seq))
        if not one.refusal and before is not None and counts(before):
            return "it lists an input of its own lineage again"
        if one.refusal and one.refusal != AMENDED:
            return "it lists a refused input of the other side"
    return ""
