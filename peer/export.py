"""`dugnad export` and `dugnad sample`: the agreed model as files that others load, and as text.

The files are written into a folder beside the wanted one, forced to the disk and moved into place
in one step: whatever happens on the way, there is a whole export or none, and one that was there
before stays until a whole one replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dugnad.dht.ids import run_text
from dugnad.dht.link import SCHEME, LinkError, parse_link
from dugnad.peer.errors import UserError
from dugnad.peer.exportcard import CARD, Snapshot, model_card
from dugnad.peer.exportlayout import CONFIG, TENSORS, layout_files
from dugnad.peer.exportsources import find_run, from_folder, from_network, newest_run
from dugnad.peer.paths import Home, disk_error, fsync_folder

_EXPORT_FILES: Final = {CARD, CONFIG, TENSORS}


def export(source: str, folder: Path, home: Home, *, force: bool = False) -> int:
    """Write the model of ``source`` (a link, or a run of ``home``) to ``folder``; the exit status.

    UserError: E013 a bad link, E014 to E016 the network, E042 no such run, E043 the folder exists.
    """
    folder = folder.absolute()
    check_target(folder, force=force)  # before anything is fetched
    snapshot = load_snapshot(source, home)
    try:
        files = layout_files(snapshot.manifest, snapshot.theta)
    except ValueError as error:
        raise UserError(
            "E044", str(error), "export another version, or from another peer"
        ) from error
    write_export(folder, {**files, CARD: model_card(snapshot)}, force=force)
    size = sum(map(len, files.values()))
    print(f"exported {describe_snapshot(snapshot)} to {folder} ({size / 1e6:,.1f} MB)")
    return 0


def load_snapshot(source: str, home: Home) -> Snapshot:
    """The newest agreed model of a link (over the network) or of a run in ``home``. UserError."""
    if not source.strip().lower().startswith(SCHEME):
        return from_folder(home, find_run(home, source))
    try:
        link = parse_link(source)
    except LinkError as error:
        raise UserError("E013", error.reason, error.fix) from error
    return asyncio.run(from_network(link))


def describe_snapshot(snapshot: Snapshot) -> str:
    """Which model it is, in one line."""
    versions = sorted(set(snapshot.versions))
    span = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    return (
        f"run {run_text(snapshot.run)[:12]}, version {span} of its {len(snapshot.versions)} "
        f"fragments, {snapshot.tokens:,} tokens"
    )


def check_target(folder: Path, *, force: bool) -> None:
    """UserError E043 unless nothing is there, or with ``force`` an export that may be replaced."""
    if not os.path.lexists(folder):
        return
    if not force:
        raise UserError("E043", f"{folder} exists", "choose a new folder, or add --force")
    if not folder.is_dir() or folder.is_symlink() or not _is_export(folder):
        raise UserError(
            "E043",
            f"{folder} is not a folder that an export made, so --force does not replace it",
            "choose another folder",
        )


def _is_export(folder: Path) -> bool:
    names = {entry.name for entry in folder.iterdir()}
    return not names or names >= _EXPORT_FILES


def write_export(folder: Path, files: Mapping[str, bytes], *, force: bool) -> None:
    """Put all ``files`` into ``folder`` in one step. UserError E017, E026 or E043."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.replaced")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(mode=0o755)
        for name, content in files.items():
            with (draft / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        fsync_folder(draft)
        check_target(folder, force=force)
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
        fsync_folder(folder.parent)
    except OSError as error:
        raise disk_error(error, folder) from error
    finally:
        if draft.exists():
            shutil.rmtree(draft, ignore_errors=True)
        if old.exists() and not folder.exists():
            with contextlib.suppress(OSError):
                old.rename(folder)
        elif old.exists():
            shutil.rmtree(old, ignore_errors=True)


def sample(
    source: str | None, home: Home, *, prompt: str, count: int, temperature: float, seed: int
) -> int:
    """Print ``count`` bytes of text that the newest agreed model writes; the exit status."""
    from dugnad.peer.learner.sampling import Sampler  # loads torch

    snapshot = load_snapshot(source, home) if source else from_folder(home, newest_run(home))
    manifest = snapshot.manifest
    sampler = Sampler(manifest.model, manifest.table, snapshot.theta)
    made = sampler.go_on(prompt.encode(), count, temperature=temperature, seed=seed)
    print(
        f"{describe_snapshot(snapshot)}; temperature {temperature:g}, seed {seed}", file=sys.stderr
    )
    print(safe_text(prompt + made.decode("utf-8", "replace")))
    return 0


def safe_text(text: str) -> str:
    """What a model wrote, harmless to a terminal: lines stay, control characters are marks."""
    return "\n".join(
        "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)
        for line in text.split("\n")
    )
