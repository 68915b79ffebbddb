"""What is made of the bytes that a donor served, or why they cannot be what was asked for."""

from __future__ import annotations

import hashlib

from dugnad.averaging.formats import (
    DIGEST_BYTES,
    FRAGMENTS_MAX,
    CommitRecord,
    HeadRow,
    commit_fault,
    header_digest,
    inputs_root,
)
from dugnad.averaging.reconcile import Summary
from dugnad.dht.ids import RunId
from dugnad.dht.records import RecordError, decode
from dugnad.peer.newswire import News, decode_news
from dugnad.peer.transferwire import (
    COMMITS_BYTES_MAX,
    HEADS_BYTES_MAX,
    STATEMENTS_BYTES_MAX,
    STATEMENTS_MAX,
    SUMMARIES_BYTES_MAX,
    GetCommits,
    Refusal,
)


def with_hash(sha256: bytes, data: bytes) -> bytes:
    """`data` if that is its hash."""
    if hashlib.sha256(data).digest() != sha256:
        raise Refusal(f"{len(data)} bytes with another SHA-256 than asked for")
    return data


def head_rows_in(data: bytes) -> tuple[HeadRow, ...]:
    """The heads in `data`, each with a digest of the proper length."""
    try:
        rows: tuple[HeadRow, ...] = decode(data, tuple[HeadRow, ...], HEADS_BYTES_MAX)
    except RecordError as fault:
        raise Refusal(fault.reason) from None
    if len(rows) > FRAGMENTS_MAX or any(len(row.digest) != DIGEST_BYTES for row in rows):
        raise Refusal("heads that no peer can have")
    return rows


def summaries_in(data: bytes) -> tuple[Summary, ...]:
    """The summaries in `data`."""
    try:
        return decode(data, tuple[Summary, ...], SUMMARIES_BYTES_MAX)
    except RecordError as fault:
        raise Refusal(fault.reason) from None


def statements_in(data: bytes) -> tuple[bytes, ...]:
    """The statements in `data`, each still encoded."""
    try:
        found = decode(data, tuple[bytes, ...], STATEMENTS_BYTES_MAX)
    except RecordError as fault:
        raise Refusal(fault.reason) from None
    if len(found) > STATEMENTS_MAX:
        raise Refusal("more statements than were asked for")
    return found


def news_in(data: bytes) -> News:
    """The news in `data`."""
    try:
        return decode_news(data)
    except RecordError as fault:
        raise Refusal(fault.reason) from None


def chain_in(run: RunId | None, request: GetCommits, data: bytes) -> tuple[CommitRecord, ...]:
    """The commits in `data` if they are the asked one and its ancestors, newest first."""
    try:
        commits: tuple[CommitRecord, ...] = decode(
            data, tuple[CommitRecord, ...], COMMITS_BYTES_MAX
        )
    except RecordError as fault:
        raise Refusal(fault.reason) from None
    if not 1 <= len(commits) <= request.count:
        raise Refusal(f"{len(commits)} commits where 1 to {request.count} were asked for")
    due = request.digest
    for commit in commits:
        if reason := linked_fault(commit, request.fragment, due):
            raise Refusal(reason)
        if run is not None and commit.header.run != run:
            raise Refusal("a commit of another run")
        due = commit.header.parent
    return commits


def linked_fault(commit: CommitRecord, fragment: int, digest: bytes) -> str:
    """Why this is not the commit of that name, or ''."""
    if reason := commit_fault(commit):
        return reason
    run = RunId(commit.header.run)
    if commit.header.fragment != fragment or header_digest(commit.header, run) != digest:
        return "a commit that is not the one that was due in the chain"
    if inputs_root(run, commit.inputs) != commit.header.inputs_root:
        return "a commit whose inputs do not match its header"
    return ""
