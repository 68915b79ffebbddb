"""From `dugnad start` and `dugnad join` to a running daemon: everything that is checked and asked
before.

Nothing here talks to the network. What can be refused is refused before the first connection: a
wrong run file, a cut link, a folder in use, a key that others can read, too little memory or disk,
no consent.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dugnad.dht.identity import FolderLock, FolderLocked, Identity, IdentityError
from dugnad.dht.ids import RunId, run_text
from dugnad.dht.link import Link, LinkError, parse_link
from dugnad.dht.protocol import PROTOCOL
from dugnad.peer.clock import wall_ms
from dugnad.peer.config import Settings
from dugnad.peer.consent import agree, check_limits, check_machine, memory_available, offer
from dugnad.peer.corpus import Corpus, CorpusError, ShardStore, build_corpus
from dugnad.peer.errors import UserError
from dugnad.peer.manifest import (
    FORMAT,
    MANIFEST_BYTES_MAX,
    Manifest,
    ManifestError,
    OtherRun,
    OtherVersion,
    build_manifest,
    check_memory,
    decode_manifest,
    encode_manifest,
    memory_need_of,
    run_id,
)
from dugnad.peer.paths import Home, disk_error, read_bounded, write_private

if TYPE_CHECKING:  # loads pydantic, which the daemon does not need
    from dugnad.peer.runfile import RunFile


@dataclass(frozen=True, slots=True)
class Ready:
    """What the daemon is started with. `corpus_folder` holds the whole text of the run, if it is
    here.
    """

    manifest: Manifest | None
    link: Link | None
    corpus_folder: Path | None


def prepare_start(run_path: Path, home: Home, settings: Settings, *, new: bool = False) -> Ready:
    """Checks the run file, signs the manifest, stores manifest and text in the run's folder, asks.

    A run file that was started from this data folder before, and has not changed, goes on with the
    same run unless `new`. UserError for everything that stands in the way.
    """
    from dugnad.peer.runfile import SOTU, data_folder, load_run_file

    run_file = load_run_file(run_path)
    folder = data_folder(run_file, run_path)
    check_memory(memory_need_of(run_file.model.config()), memory_available())
    check_limits(settings, home)
    identity = open_home(home)
    corpus = _read_corpus(SOTU if folder is None else str(folder))
    manifest = build_manifest(run_file, identity, corpus.index, created_ms=wall_ms())
    earlier = None if new else _same_run(manifest, home)
    if earlier is not None:
        print(f"going on with run {run_text(run_id(earlier))} (--new starts another)")
        manifest = earlier
    check_machine(manifest, home)
    if earlier is None:
        agree([*_chosen(run_file), *offer(manifest, settings, home)], yes=settings.yes)
    place = home.run(run_id(manifest))
    place.create()
    try:
        ShardStore(place.shards, manifest.data.index).fill(corpus)
    except OSError as error:
        raise disk_error(error, place.shards) from error
    except CorpusError as error:
        raise UserError("E020", error.reason, error.fix) from error
    write_private(place.manifest, encode_manifest(manifest))
    return Ready(manifest, None, place.shards)


def prepare_join(link_text: str, home: Home, settings: Settings) -> Ready:
    """Reads the link, finds what is kept of the run, asks. UserError for what stands in the way.

    The manifest is None when this data folder has never seen the run: then the daemon fetches it
    and gives the bytes to `accept_manifest`.
    """
    try:
        link = parse_link(link_text)
    except LinkError as error:
        raise UserError("E013", error.reason, error.fix) from error
    check_limits(settings, home)
    identity = open_home(home)
    manifest = stored_manifest(link.run, home)
    if manifest is None:
        agree(offer(None, settings, home), yes=settings.yes)
    else:
        check_machine(manifest, home)
        check_admission(manifest, identity)
    return Ready(manifest, link, None)


def accept_manifest(data: bytes, run: RunId, home: Home, identity: Identity) -> Manifest:
    """The manifest of `run` that a peer sent, checked against this machine and stored.

    For the daemon of a peer that joins. UserError: E014 another run, E015 another version, E025
    refused, E023 not admitted, E021 memory, E017 disk.
    """
    try:
        manifest = decode_manifest(data, run)
    except ManifestError as error:
        raise manifest_error(error) from error
    check_admission(manifest, identity)
    check_machine(manifest, home)
    place = home.run(run)
    place.create()
    write_private(place.manifest, data)
    return manifest


def open_home(home: Home) -> Identity:
    """The identity of the data folder, made on first use. UserError when in use, unreadable or
    unsafe.
    """
    home.create()
    try:
        with FolderLock(home.root):
            return Identity.load_or_create(home.identity_key)
    except FolderLocked as error:
        raise folder_locked(error, home) from error
    except IdentityError as error:
        raise identity_error(error) from error
    except OSError as error:
        raise disk_error(error, home.root) from error


def folder_locked(error: FolderLocked, home: Home) -> UserError:
    """What a person reads when another daemon has the data folder."""
    return UserError(
        "E022",
        f"process {error.pid or '(unknown)'} uses the data folder {home.root}",
        "use that daemon (`dugnad status`), stop it (`dugnad leave`), or choose another --home",
    )


def identity_error(error: IdentityError) -> UserError:
    """What a person reads when the identity key cannot be used."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError("E017", f"the disk is full: {error.reason}", "free some space")
    return UserError("E019", error.reason, error.fix)


def check_admission(manifest: Manifest, identity: Identity) -> None:
    """UserError E023 when the run has an admission list without this peer."""
    if not manifest.admits(identity.peer):
        raise UserError(
            "E023",
            f"the run {manifest.name!r} admits {len(manifest.admission)} peers, and not this one",
            "send the organiser the peer id that `dugnad identity show` prints",
        )


def manifest_error(error: ManifestError) -> UserError:
    """What a person reads when a manifest is refused."""
    if isinstance(error, OtherRun):
        return UserError("E014", error.reason, "ask for the link again")
    if isinstance(error, OtherVersion):
        newer = (error.format, error.protocol) > (FORMAT, PROTOCOL)
        fix = "update dugnad" if newer else "join with the older version that the run was made for"
        return UserError("E015", error.reason, f"{fix}; `dugnad version` says what this is")
    return UserError("E025", error.reason, "ask the organiser for a new link")


def stored_manifest(run: RunId, home: Home) -> Manifest | None:
    """The manifest of `run` that this data folder keeps, checked; None if none, or a damaged one.

    UserError E015 when it is of another protocol version.
    """
    try:
        return decode_manifest(read_bounded(home.run(run).manifest, MANIFEST_BYTES_MAX), run)
    except OtherVersion as error:
        raise manifest_error(error) from error
    except (OSError, ValueError, ManifestError):
        return None


def _same_run(manifest: Manifest, home: Home) -> Manifest | None:
    """The newest run of this data folder that differs from `manifest` in its moment of creation
    only.
    """
    wanted = _timeless(manifest)
    found = []
    for run in home.known_runs():
        try:
            stored = stored_manifest(run, home)
        except UserError:  # of another protocol version: certainly not the same
            continue
        if stored is not None and _timeless(stored) == wanted:
            found.append(stored)
    return max(found, key=lambda one: one.created_ms, default=None)


def _timeless(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, created_ms=0, signature=b"")


def _read_corpus(source: str) -> Corpus:
    try:
        return build_corpus(source)
    except CorpusError as error:
        raise UserError("E020", error.reason, error.fix) from error


def _chosen(run_file: "RunFile") -> list[tuple[str, str]]:
    """What the organiser chose, defaults included, that no other row says."""
    train = run_file.train
    return [
        (
            "training",
            f"batches of {train.batch_sequences} and units of {train.unit_sequences} sequences, "
            f"rate {train.learning_rate:g} to {train.min_learning_rate:g} at "
            f"{run_file.decay_tokens():,} tokens",
        )
    ]
