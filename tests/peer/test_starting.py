"""What is checked and asked between the command and the daemon."""

import errno
import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from dugnad.dht.identity import FolderLock, Identity
from dugnad.dht.ids import RunId, peer_text
from dugnad.dht.link import format_link
from dugnad.dht.protocol import PROTOCOL
from dugnad.peer.config import Settings
from dugnad.peer.corpus import ShardStore
from dugnad.peer.errors import UserError
from dugnad.peer.manifest import FORMAT, encode_manifest, run_id
from dugnad.peer.paths import Home
from dugnad.peer.runfile import EXAMPLE_RUN
from dugnad.peer.starting import (
    Ready,
    accept_manifest,
    prepare_join,
    prepare_start,
    stored_manifest,
)

YES = Settings(threads=1, yes=True)
SEED = Identity.ephemeral(b"s" * 32).peer


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A run file of a small model with a folder of text beside it."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Fellow citizens. " * 400)
    text = (
        EXAMPLE_RUN.replace('"sotu"', '"texts"', 1)
        .replace("dim = 128 ", "dim = 16 ")
        .replace("layers = 4", "layers = 1")
        .replace("hidden = 352", "hidden = 24")
        .replace("context = 128", "context = 32")
    )
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def refused_start(run_path: Path, home: Home, settings: Settings = YES) -> UserError:
    """The error that starting gives."""
    with pytest.raises(UserError) as caught:
        prepare_start(run_path, home, settings)
    return caught.value


def refused_join(link: str, home: Home, settings: Settings = YES) -> UserError:
    """The error that joining gives."""
    with pytest.raises(UserError) as caught:
        prepare_join(link, home, settings)
    return caught.value


def link_to(ready: Ready) -> str:
    """A link to the run that was made ready."""
    assert ready.manifest is not None
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{peer_text(SEED)}"
    return format_link(run_id(ready.manifest), [address])


def test_starting_leaves_manifest_and_text_in_the_run_s_folder(run_path: Path, home: Home) -> None:
    ready = prepare_start(run_path, home, YES)
    assert ready.manifest is not None
    place = home.run(run_id(ready.manifest))
    assert place.manifest.read_bytes() == encode_manifest(ready.manifest)
    assert ready.corpus_folder == place.shards
    store = ShardStore(place.shards, ready.manifest.data.index)
    assert store.missing() == []
    assert store.tokens_path.read_bytes() == b"Fellow citizens. " * 400
    assert ready.manifest.organiser == Identity.load(home.identity_key).peer


def test_the_same_run_file_goes_on_with_the_same_run(run_path: Path, home: Home) -> None:
    first = prepare_start(run_path, home, YES)
    again = prepare_start(run_path, home, Settings(threads=1))  # and is not asked about again
    assert again.manifest == first.manifest
    other = prepare_start(run_path, home, YES, new=True)
    assert other.manifest != first.manifest
    run_path.write_text(run_path.read_text().replace("seed = 1", "seed = 2"))
    changed = prepare_start(run_path, home, YES)
    assert changed.manifest not in (first.manifest, other.manifest)


def test_nothing_is_left_when_the_answer_is_missing(run_path: Path, home: Home) -> None:
    assert refused_start(run_path, home, Settings(threads=1)).number == "E003"
    assert home.known_runs() == []


def test_a_data_folder_in_use_is_refused_with_the_process(run_path: Path, home: Home) -> None:
    with FolderLock(home.root):
        error = refused_start(run_path, home)
        assert error.number == "E022"
        assert f"process {os.getpid()} " in error.sentence
        assert refused_join("dugnad:" + "x" * 60, home).number == "E013"  # said before that


def test_a_key_that_others_can_read_is_refused(run_path: Path, home: Home) -> None:
    Identity.create(home.identity_key)
    home.identity_key.chmod(0o644)
    error = refused_start(run_path, home)
    assert (error.number, error.exit_code) == ("E019", 19)
    assert error.fix == f"chmod 600 {home.identity_key}"


def test_a_model_too_large_is_refused_before_anything_is_made(
    run_path: Path, tmp_path: Path
) -> None:
    text = run_path.read_text().replace("dim = 16 ", "dim = 32768 ")
    run_path.write_text(text.replace("hidden = 24", "hidden = 65536"))
    fresh = Home(tmp_path / "fresh")
    error = refused_start(run_path, fresh)
    assert error.number == "E021"
    assert not fresh.root.exists()


def test_no_text_is_refused(run_path: Path, home: Home) -> None:
    (run_path.parent / "texts" / "a.txt").write_text("")
    assert refused_start(run_path, home).number == "E020"
    (run_path.parent / "texts" / "a.txt").unlink()
    assert refused_start(run_path, home).number == "E020"


@pytest.mark.parametrize("cut", [0, 7, 30, -1])
def test_a_cut_link_is_refused(run_path: Path, home: Home, cut: int) -> None:
    link = link_to(prepare_start(run_path, home, YES))
    error = refused_join(link[:cut], home)
    assert (error.number, error.exit_code) == ("E013", 13)


def test_joining_a_new_run_asks_and_leaves_the_manifest_to_the_daemon(home: Home) -> None:
    link = format_link(RunId(b"r" * 32), [f"/ip4/127.0.0.1/tcp/9/p2p/{peer_text(SEED)}"])
    assert refused_join(link, home, Settings(threads=1)).number == "E003"
    ready = prepare_join(link, home, YES)
    assert ready.manifest is None
    assert ready.link is not None
    assert ready.link.run == b"r" * 32


def test_joining_a_known_run_does_not_ask(run_path: Path, home: Home) -> None:
    started = prepare_start(run_path, home, YES)
    ready = prepare_join(link_to(started), home, Settings(threads=1))
    assert ready.manifest == started.manifest


def test_a_damaged_manifest_is_fetched_again(run_path: Path, home: Home) -> None:
    started = prepare_start(run_path, home, YES)
    assert started.manifest is not None
    home.run(run_id(started.manifest)).manifest.write_bytes(b"damaged")
    assert prepare_join(link_to(started), home, YES).manifest is None


def test_a_run_that_does_not_admit_us_is_refused(
    run_path: Path, home: Home, tmp_path: Path
) -> None:
    listed = f'admission = ["{peer_text(SEED)}"]'
    run_path.write_text(run_path.read_text().replace('admission = "open"', listed))
    started = prepare_start(run_path, home, YES)  # the organiser always may
    assert started.manifest is not None
    stranger = Home(tmp_path / "stranger")
    place = stranger.run(run_id(started.manifest))
    place.create()
    place.manifest.write_bytes(encode_manifest(started.manifest))
    assert refused_join(link_to(started), stranger).number == "E023"


def test_a_fetched_manifest_is_checked_and_kept(run_path: Path, home: Home, tmp_path: Path) -> None:
    started = prepare_start(run_path, home, YES)
    assert started.manifest is not None
    data, run = encode_manifest(started.manifest), run_id(started.manifest)
    joiner, identity = Home(tmp_path / "joiner"), Identity.ephemeral(b"j" * 32)
    assert accept_manifest(data, run, joiner, identity) == started.manifest
    assert stored_manifest(run, joiner) == started.manifest
    later = msgspec.msgpack.encode([FORMAT, PROTOCOL + 1])
    for bad, name, number in (
        (data, RunId(bytes(32)), "E014"),
        (later, RunId(hashlib.sha256(later).digest()), "E015"),
        (b"junk", RunId(hashlib.sha256(b"junk").digest()), "E025"),
    ):
        with pytest.raises(UserError) as caught:
            accept_manifest(bad, name, joiner, identity)
        assert caught.value.number == number


def test_a_full_disk_is_reported_as_such(
    run_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ShardStore, corpus: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardStore, "fill", full)
    assert refused_start(run_path, home).number == "E017"
