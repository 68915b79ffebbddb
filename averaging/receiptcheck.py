"""Whether a commit that somebody hands over is a true record: shape, roots and every signature.

This is what can be judged of a commit alone. Whether it follows from its parent is the lineage's
judgement, and which lineage counts is that of the heads.
"""

from __future__ import annotations

from typing import Final

from dugnad.averaging.formats import (
    CommitRecord,
    Input,
    commit_fault,
    inputs_root,
    pieces_root,
    signature_holds,
)
from dugnad.averaging.lineage import CLOCK_AHEAD_MS, piece_tokens
from dugnad.dht.ids import PeerId, RunId, peer_text
from dugnad.dht.records import Verifier

KINDS: Final = ("merge", "join")
"""Kinds of commits that are kept; a join (rule 11) may list nothing."""


def commit_reason(
    record: CommitRecord, run: RunId, sequence_tokens: int, verify: Verifier, wall_ms: int
) -> str:
    """Why `record` is not a true commit of `run`, or ''. A receipt that is at fault is named."""
    header = record.header
    fault = commit_fault(record)
    if fault:
        return fault
    if header.run != run:
        return "it belongs to another run"
    if header.kind not in KINDS:
        return f"commits of kind {header.kind!r} are not read by this version"
    if header.time_ms > wall_ms + CLOCK_AHEAD_MS:
        return "it is dated more than a minute ahead"
    if not signature_holds(header, run, verify):
        return f"it is not signed by its home {peer_text(PeerId(header.home))}"
    if inputs_root(run, record.inputs) != header.inputs_root:
        return "its receipts do not match the root that its home signed"
    for one in record.inputs:
        fault = _receipt_fault(one, record, run, sequence_tokens)
        if not fault and not signature_holds(one.contribution, run, verify):
            fault = "it is not signed by its maker"
        if fault:
            made = one.contribution
            return f"receipt {made.seq} of {peer_text(PeerId(made.peer))}: {fault}"
    order = [(one.contribution.peer, one.contribution.seq) for one in record.inputs]
    if order != sorted(set(order)):
        return "its receipts are not in ascending order of (peer, seq), each once"
    return ""


def _receipt_fault(one: Input, record: CommitRecord, run: RunId, sequence_tokens: int) -> str:
    made = one.contribution
    if made.fragment != record.header.fragment:
        return "it is of another fragment"
    if made.base >= record.header.version:
        return f"it was made on version {made.base}, not before this one"
    if pieces_root(run, one.pieces) != made.pieces_root:
        return "its units do not match the root that its maker signed"
    if piece_tokens(one.pieces, sequence_tokens) != made.tokens:
        return "its tokens do not follow from its units"
    return ""
