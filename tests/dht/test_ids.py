"""Names of peers and runs: exact text forms, and reasons for wrong ones."""

import contextlib
import subprocess
import sys

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht import ids
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.words import WORDS

KEYS = st.binary(min_size=32, max_size=32)


@given(KEYS)
def test_peer_text_is_the_libp2p_id_and_parses_back(key: bytes) -> None:
    peer = PeerId(key)
    text = ids.peer_text(peer)
    assert text == base58.b58encode(bytes.fromhex("002408011220") + key).decode()
    assert text.startswith("12D3KooW")
    assert len(text) == 52
    assert ids.parse_peer(text) == peer
    assert text.endswith(ids.short(peer))


@given(KEYS)
def test_run_text_parses_back(key: bytes) -> None:
    run = RunId(key)
    text = ids.run_text(run)
    assert len(text) == 52
    assert text == text.lower()
    assert ids.parse_run(text) == run


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not the id"),
        ("12D3KooW0", "'0' cannot occur"),
        ("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not the id of an Ed25519 key"),
        ("1" * 65, "52 characters"),
        ("1" * 64, "not the id"),
        ("12D3KooWé", "cannot occur"),
    ],
)
def test_a_wrong_peer_id_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ids.parse_peer(text)


def test_a_cut_peer_id_is_refused() -> None:
    text = ids.peer_text(PeerId(bytes(range(32))))
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"not the id|cut short"):
            ids.parse_peer(text[:length])


@pytest.mark.parametrize("text", ["", "a" * 51, "a" * 53, "1" * 52, "é" * 52, "a" * 51 + "b"])
def test_a_wrong_run_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        ids.parse_run(text)


@given(st.text(max_size=80))
def test_parsers_raise_nothing_but_value_errors(text: str) -> None:
    for parse in (ids.parse_peer, ids.parse_run):
        with contextlib.suppress(ValueError):
            parse(text)


def test_names_are_three_words_and_stay_the_same_for_ever() -> None:
    assert ids.name_of(PeerId(bytes(32))) == "robin-kind-grand"
    assert len({ids.name_of(PeerId(bytes([n]) * 32)) for n in range(256)}) == 256


def test_words_are_256_short_lower_case_letters() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)
    assert max(len(word) for word in WORDS) <= 8
    assert list(WORDS) == sorted(WORDS)


@pytest.mark.slow
def test_importing_ids_loads_nothing_heavy() -> None:
    code = (
        "import sys, dugnad.dht.ids\n"
        "heavy = {'cryptography', 'msgspec', 'numpy', 'torch', 'hivemind', 'asyncio', 'base58'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
