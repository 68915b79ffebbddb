"""Manifests: made by an organiser, judged by everybody else."""

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.fragments import FragmentTable, build_table
from dugnad.averaging.outer import bits_of
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.protocol import PROTOCOL
from dugnad.peer.corpus import SHARD_BYTES, DataIndex
from dugnad.peer.errors import UserError
from dugnad.peer.manifest import (
    MANIFEST_BYTES_MAX,
    Manifest,
    ManifestError,
    OtherRun,
    OtherVersion,
    build_manifest,
    check_memory,
    decode_manifest,
    describe,
    encode_manifest,
    leanest_commit,
    memory_need,
    run_id,
    sign,
)
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.runfile import EXAMPLE_RUN, parse_run_file

ORGANISER = Identity.ephemeral(b"o" * 32)
SMALL = (
    EXAMPLE_RUN.replace("dim = 128 ", "dim = 16 ")
    .replace("layers = 4", "layers = 1")
    .replace("hidden = 352", "hidden = 24")
    .replace("context = 128", "context = 32")
)
INDEX = DataIndex(2 * SHARD_BYTES - 5, (b"1" * 32, b"2" * 32))


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """A small run's manifest."""
    return build_manifest(parse_run_file(SMALL), ORGANISER, INDEX, created_ms=1_000)


def resigned(manifest: Manifest, **changes: Any) -> bytes:
    """The bytes of a changed manifest with a good signature. Any: fields of all types."""
    return encode_manifest(sign(msgspec.structs.replace(manifest, **changes), ORGANISER))


def test_a_manifest_comes_back_as_it_was_made(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data, run_id(manifest)) == manifest
    assert run_id(manifest) == hashlib.sha256(data).digest()


def test_a_manifest_says_what_its_run_file_says(manifest: Manifest) -> None:
    assert manifest.name == "State of the Union"
    assert manifest.organiser == ORGANISER.peer
    assert manifest.batch_sequences == 8
    assert (manifest.unit_sequences, manifest.token_budget, manifest.seed) == (64, 50_000_000, 1)
    assert manifest.exchange.merge_floor_ms == 1000
    assert manifest.outer.mu_bits == bits_of(0.0)
    assert manifest.data.held_out_start < manifest.data.sequences == (INDEX.size - 1) // 32
    assert manifest.model.tensor_specs() == list(manifest.table.tensors)
    assert any("open" in text for _, text in describe(manifest))


def test_the_same_run_file_gives_the_same_manifest_bytes(manifest: Manifest) -> None:
    again = build_manifest(parse_run_file(SMALL), ORGANISER, INDEX, created_ms=1_000)
    assert encode_manifest(again) == encode_manifest(manifest)


def test_another_seed_gives_another_version_0(manifest: Manifest) -> None:
    run_file = parse_run_file(SMALL.replace("seed = 1", "seed = 2"))
    other = build_manifest(run_file, ORGANISER, INDEX, created_ms=1_000)
    assert all(a != b for a, b in zip(other.v0_roots, manifest.v0_roots, strict=True))


def test_merges_of_an_older_run_stay_in_codecs_that_all_its_peers_can_read(
    manifest: Manifest,
) -> None:
    assert leanest_commit(manifest) == "int4"
    older = decode_manifest(resigned(manifest, protocol=1))
    assert leanest_commit(older) == "int8"
    lean = msgspec.structs.replace(manifest.exchange, commit_codec="int4")
    assert decode_manifest(resigned(manifest, exchange=lean)).exchange.commit_codec == "int4"
    with pytest.raises(ManifestError, match="'int4' is too coarse"):
        decode_manifest(resigned(manifest, exchange=lean, protocol=1))


def test_a_manifest_of_another_run_is_refused(manifest: Manifest) -> None:
    with pytest.raises(OtherRun, match="another run"):
        decode_manifest(encode_manifest(manifest), RunId(bytes(32)))


def test_a_manifest_of_another_version_is_refused_as_such(manifest: Manifest) -> None:
    with pytest.raises(OtherVersion, match=f"protocol {PROTOCOL + 1}"):
        decode_manifest(resigned(manifest, protocol=PROTOCOL + 1))
    later_layout = msgspec.msgpack.encode([2, 7, "whatever comes then"])
    with pytest.raises(OtherVersion, match="protocol 7"):
        decode_manifest(later_layout)


def test_only_the_organiser_can_sign(manifest: Manifest) -> None:
    other = Identity.ephemeral(b"x" * 32)
    stolen = msgspec.structs.replace(manifest, organiser=bytes(other.peer))
    with pytest.raises(ManifestError, match="signature does not hold"):
        decode_manifest(encode_manifest(stolen))
    with pytest.raises(ManifestError, match="not signed"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, signature=b"")))


def other_table(manifest: Manifest) -> FragmentTable:
    """A sound table of another model."""
    specs = ModelConfig(dim=8, layers=1, heads=1, hidden=8, context=32).tensor_specs()
    return build_table(specs, len(manifest.table.fragments))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", "n" * 81, "its name has 81 characters"),
        ("name", "a\u202eb", "its name has control or invisible"),
        ("name", " ", "its name is empty"),
        ("purpose", "a\nb", "its purpose has control"),
        ("licence", "\x07", "its licence has control"),
        ("admission", (b"short",), "not a key"),
        ("admission", (b"b" * 32, b"a" * 32), "not in order"),
        ("admission", (b"a" * 32, b"a" * 32), "not in order"),
        ("admission", tuple(i.to_bytes(32, "big") for i in range(2000)), "admits 2000 keys"),
        ("created_ms", -1, "created_ms -1"),
        ("created_ms", 1 << 60, "created_ms"),
        ("unit_sequences", 0, "unit_sequences 0"),
        ("unit_sequences", 1 << 20, "unit_sequences"),
        ("token_budget", 0, "token_budget 0"),
        ("seed", -1, "seed -1"),
        ("v0_roots", (b"r" * 32,), "for each fragment"),
        ("v0_roots", (b"r",) * 4, "wrong length"),
    ],
)
def test_a_part_out_of_range_is_refused(
    manifest: Manifest, field: str, value: object, said: str
) -> None:
    with pytest.raises(ManifestError, match=said):
        decode_manifest(resigned(manifest, **{field: value}))


@pytest.mark.parametrize(
    ("part", "field", "value", "said"),
    [
        ("data", "kind", "pickle", "'pickle' is unknown"),
        ("data", "root", b"r" * 32, "not that of its data index"),
        ("data", "context", 64, "another context"),
        ("data", "sequences", 10, "number of sequences"),
        ("data", "held_out_start", 1, "too few sequences to train on"),
        ("data", "held_out_start", 1 << 30, "none to measure with"),
        ("outer", "eta_bits", bits_of(50.0), "outer learning rate"),
        ("outer", "eta_bits", bits_of(float("nan")), "outer learning rate"),
        ("outer", "eta_bits", -1, "32 bits"),
        ("outer", "mu_bits", bits_of(1.0), "outer momentum"),
        ("outer", "rule", "median", "'median' is unknown"),
        ("exchange", "hand_in_codec", "exec", "'exec' is unknown"),
        ("exchange", "commit_codec", "", "'' is unknown"),
        ("exchange", "commit_codec", "topk-1.56", "'topk-1.56' is too coarse"),
        ("exchange", "steps_per_merge", 0, "steps_per_merge 0"),
        ("exchange", "merge_floor_ms", 0, "merge_floor_ms 0"),
        ("exchange", "tokens_per_merge", -1, "tokens_per_merge -1"),
        ("exchange", "staleness", 99, "staleness 99"),
        ("exchange", "horizon", 1, "horizon 1"),
    ],
)
def test_a_wrong_policy_is_refused(
    manifest: Manifest, part: str, field: str, value: object, said: str
) -> None:
    changes = {part: msgspec.structs.replace(getattr(manifest, part), **{field: value})}
    with pytest.raises(ManifestError, match=said):
        decode_manifest(resigned(manifest, **changes))


def test_a_table_that_is_not_that_of_the_model_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="not that of its model"):
        decode_manifest(resigned(manifest, table=other_table(manifest)))
    torn = FragmentTable(manifest.table.tensors, manifest.table.fragments[:-1])
    with pytest.raises(ManifestError, match="fragment table is wrong"):
        decode_manifest(resigned(manifest, table=torn))


def test_there_is_only_one_proper_encoding(manifest: Manifest) -> None:
    fields = msgspec.msgpack.decode(encode_manifest(manifest))
    with pytest.raises(ManifestError):
        decode_manifest(msgspec.msgpack.encode([*fields, "one more"]))
    widened = b"\xdd" + len(fields).to_bytes(4, "big")  # the same list with a longer length
    longer = widened + encode_manifest(manifest)[3:]
    assert msgspec.msgpack.decode(longer) == fields
    with pytest.raises(ManifestError, match="one proper way"):
        decode_manifest(longer)


@settings(max_examples=30)
@given(st.data())
def test_whatever_the_bytes_decoding_gives_a_manifest_or_a_reason(data: st.DataObject) -> None:
    good = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    cut = bytes(good[: data.draw(st.integers(0, len(good)))])
    for candidate in (bytes(good), cut, data.draw(st.binary(max_size=64))):
        if candidate != _GOOD:
            with pytest.raises(ManifestError):
                decode_manifest(candidate)


def test_an_endless_manifest_is_not_even_read() -> None:
    with pytest.raises(ManifestError, match="more than"):
        decode_manifest(bytes(MANIFEST_BYTES_MAX + 1))


def test_a_list_admits_its_peers_and_the_organiser(manifest: Manifest) -> None:
    stranger = PeerId(b"s" * 32)
    assert manifest.admits(stranger)
    closed = msgspec.structs.replace(manifest, admission=(b"f" * 32,))
    assert not closed.admits(stranger)
    assert closed.admits(PeerId(b"f" * 32))
    assert closed.admits(ORGANISER.peer)


def test_too_little_text_is_the_organisers_error() -> None:
    with pytest.raises(UserError, match="at least 64 are needed") as caught:
        build_manifest(parse_run_file(SMALL), ORGANISER, DataIndex(99, (b"1" * 32,)), created_ms=0)
    assert caught.value.number == "E012"


def test_a_model_too_large_for_memory_says_need_and_have(manifest: Manifest) -> None:
    need = memory_need(manifest)
    assert need.model >= 50 * manifest.table.total
    check_memory(need, need.total)
    with pytest.raises(UserError, match=r"needs \d+ MB of memory, this machine has 1 MB") as caught:
        check_memory(need, 1_000_000)
    assert caught.value.exit_code == 21


_GOOD = encode_manifest(build_manifest(parse_run_file(SMALL), ORGANISER, INDEX, created_ms=1_000))
