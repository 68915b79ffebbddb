"""Whether a commit that somebody hands over is a true record: shape, roots and every signature.

This is what can be judged of a commit alone. Whether it follows from its parent is the lineage's
judgement, and which lineage counts is that of the heads.
"""

from __future__ import annotations

import msgspec

from dugnad.averaging.formats import (
    Ack,
    CommitRecord,
    Input,
    ack_fault,
    commit_fault,
    header_digest,
    inputs_root,
    pieces_root,
    signature_holds,
)
from dugnad.averaging.join import KINDS, MERGE
from dugnad.averaging.lineage import CLOCK_AHEAD_MS, piece_tokens
from dugnad.dht.ids import PeerId, RunId, peer_text
from dugnad.dht.records import Verifier


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
    home = peer_text(PeerId(header.home))
    if not header.signature:
        return f"it is unsigned: its home {home} has put no name to it"
    if not signature_holds(header, run, verify):
        return f"it is not signed by its home {home}: forged, or damaged"
    if inputs_root(run, record.inputs) != header.inputs_root:
        return "its receipts do not match the root that its home signed"
    for one in record.inputs:
        fault = _receipt_fault(one, record, run, sequence_tokens)
        if not fault and not one.contribution.signature:
            fault = "it is unsigned: its maker has put no name to it"
        if not fault and not signature_holds(one.contribution, run, verify):
            fault = "it is not signed by its maker: forged, or damaged"
        if fault:
            made = one.contribution
            return f"receipt {made.seq} of {peer_text(PeerId(made.peer))}: {fault}"
    order = [(one.contribution.peer, one.contribution.seq) for one in record.inputs]
    if order != sorted(set(order)):
        return "its receipts are not in ascending order of (peer, seq), each once"
    return ""


def ack_reason(ack: Ack, record: CommitRecord, run: RunId, verify: Verifier) -> str:
    """Why `ack` is not another peer's true word that it computed what `record` says, or ''."""
    fault = ack_fault(ack)
    if fault:
        return fault
    if ack.digest != header_digest(record.header, run):
        return "an ack of another commit"
    who = peer_text(PeerId(ack.peer))
    if ack.peer == record.header.home:
        return f"it is self-witnessed: its home {who} acknowledges it"
    if not signature_holds(ack, run, verify):
        return f"the ack of {who} is not signed by it: forged, or damaged"
    return ""


def with_true_acks(record: CommitRecord, run: RunId, verify: Verifier) -> CommitRecord:
    """`record` with those of its acks that hold: nothing that a digest names covers them."""
    acks = tuple(ack for ack in record.acks if not ack_reason(ack, record, run, verify))
    return record if acks == record.acks else msgspec.structs.replace(record, acks=acks)


def _receipt_fault(one: Input, record: CommitRecord, run: RunId, sequence_tokens: int) -> str:
    made = one.contribution
    if made.fragment != record.header.fragment:
        return "it is of another fragment"
    if record.header.kind == MERGE and made.base >= record.header.version:
        return f"it was made on version {made.base}, not before this one"
    if pieces_root(run, one.pieces) != made.pieces_root:
        return "its units do not match the root that its maker signed"
    if piece_tokens(one.pieces, sequence_tokens) != made.tokens:
        return "its tokens do not follow from its units"
    return ""
