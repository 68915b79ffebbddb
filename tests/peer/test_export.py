"""The exported model: what transformers' Llama makes of the files, and when none are written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dugnad.averaging.fragments import build_table
from dugnad.averaging.tree import Vector
from dugnad.dht.identity import Identity
from dugnad.dht.ids import run_text
from dugnad.peer.corpus import SHARD_BYTES, DataIndex
from dugnad.peer.errors import UserError
from dugnad.peer.export import check_target, export, safe_text, write_export
from dugnad.peer.exportcard import Snapshot, model_card
from dugnad.peer.exportlayout import TENSORS, layout_files
from dugnad.peer.exportsources import from_folder
from dugnad.peer.init import initial_parameters
from dugnad.peer.manifest import Manifest, build_manifest, encode_manifest, run_id, sign
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.paths import Home
from dugnad.peer.runfile import EXAMPLE_RUN, parse_run_file

from .conftest import make_board  # noqa: TID252  the tests are no installed package

ORGANISER = Identity.ephemeral(b"o" * 32)
SMALL = (
    EXAMPLE_RUN.replace("dim = 128 ", "dim = 16 ")
    .replace("layers = 4", "layers = 1")
    .replace("hidden = 352", "hidden = 24")
    .replace("context = 128", "context = 32")
)
INDEX = DataIndex(2 * SHARD_BYTES - 5, (b"1" * 32, b"2" * 32))
MODELS = (
    ModelConfig(dim=48, layers=3, heads=6, hidden=80, context=64),
    ModelConfig(
        dim=32, layers=2, heads=4, kv_heads=2, hidden=40, context=64, rope_theta=5e4, tied=False
    ),
    ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48, context=64, vocab=300),
)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """A small run's manifest."""
    return build_manifest(parse_run_file(SMALL), ORGANISER, INDEX, created_ms=1_000)


def of_model(manifest: Manifest, model: ModelConfig) -> Manifest:
    table = build_table(model.tensor_specs(), 4)
    return msgspec.structs.replace(manifest, model=model, table=table)


def wild(size: int) -> Vector:
    """Parameters far from their initial values: every term of the model counts."""
    values: Vector = np.random.default_rng(3).standard_normal(size).astype(np.float32)
    return values * np.float32(0.3)


def snapshot_of(manifest: Manifest, **changes: object) -> Snapshot:
    theta = initial_parameters(manifest.table, manifest.model, manifest.seed)
    versions = (3,) * len(manifest.table.fragments)
    fields: dict[str, object] = {
        "run": run_id(manifest),
        "manifest": manifest,
        "versions": versions,
        "tokens": 1000,
        "theta": theta,
        "board": make_board(900),
    }
    return Snapshot(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_the_files_and_computes_our_logits(
    manifest: Manifest, model: ModelConfig, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from dugnad.peer.learner.sampling import Sampler

    made = of_model(manifest, model)
    theta = wild(made.table.total)
    write_export(tmp_path / "out", layout_files(made, theta), force=False)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(one.numel() for one in theirs.parameters()) == model.parameter_count()
    ours = Sampler(model, made.table, theta)
    for length in (1, 2, 17, model.context):
        tokens = [random.Random(length).randrange(model.vocab) for _ in range(length)]
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens])).logits[0].numpy()
        expected = ours.logits(tokens)
        spread = float(expected.std())
        assert spread > 0.2, "logits near zero would compare equal by accident"
        np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_transformers_tokenizer_gives_bytes_and_gives_them_back(
    manifest: Manifest, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    write_export(tmp_path / "out", layout_files(manifest, wild(manifest.table.total)), force=False)
    path = tmp_path / "out" / "tokenizer.json"
    loaded = [
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(path)),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
    ]
    every = "".join(map(chr, range(128))) + "æøå \t\r\n  two  Ünï–čøde 🤝 \x00\u202e"
    for tokenizer in loaded:
        for text in (every, " a", "a ", "it's 12 o'clock", "\n\n"):
            ids = tokenizer(text)["input_ids"]
            assert ids == list(text.encode())
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_folder_that_exists_is_refused_before_anything_is_fetched(
    home: Home, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError) as refused:
        export("no run at all", tmp_path / "out", home)
    assert refused.value.number == "E043"
    assert "--force" in refused.value.fix


def test_force_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.txt").write_text("mine")
    with pytest.raises(UserError, match="not a folder that an export made"):
        check_target(mine, force=True)
    files = {"README.md": b"1", "config.json": b"{}", TENSORS: b"t"}
    write_export(tmp_path / "out", files, force=False)
    write_export(tmp_path / "out", {**files, "README.md": b"2"}, force=True)
    assert (tmp_path / "out" / "README.md").read_bytes() == b"2"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "thesis"]


def test_a_torn_export_leaves_the_good_one_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"README.md": b"good", "config.json": b"{}", TENSORS: b"t"}
    write_export(tmp_path / "out", files, force=False)

    def broken(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dugnad.peer.export.os.fsync", broken)
    with pytest.raises(UserError) as full:
        write_export(tmp_path / "out", {**files, "README.md": b"new"}, force=True)
    assert full.value.number == "E017"
    assert (tmp_path / "out" / "README.md").read_bytes() == b"good"
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_the_card_names_run_tokens_contributors_and_licence(manifest: Manifest) -> None:
    text = model_card(snapshot_of(manifest)).decode()
    assert run_text(run_id(manifest)) in text
    assert "1,000 of 50,000,000 tokens" in text
    assert "still being trained" in text
    assert "| 900 |" in text
    assert f"## Licence\n\n{manifest.licence.replace('-', chr(92) + '-')}" in text
    done = model_card(snapshot_of(manifest, tokens=manifest.token_budget)).decode()
    assert "reached its token budget" in done
    unknown = model_card(snapshot_of(manifest, board=None)).decode()
    assert "not known" in unknown


def test_foreign_words_in_the_card_are_no_markup(manifest: Manifest) -> None:
    hostile = "x](http://evil) <script> | **bold**"
    named = msgspec.structs.replace(manifest, name=hostile, licence='MIT"\nlicense: evil')
    text = model_card(snapshot_of(named)).decode()
    assert "<script>" not in text
    assert "](http" not in text.replace("\\](", "")
    assert "\nlicense: evil" not in text


def test_a_model_with_a_number_that_is_not_finite_is_not_exported(manifest: Manifest) -> None:
    theta = wild(manifest.table.total)
    theta[7] = np.nan
    with pytest.raises(ValueError, match="finite"):
        layout_files(manifest, theta)


def test_a_run_that_never_merged_is_exported_at_version_0(manifest: Manifest, home: Home) -> None:
    place = home.run(run_id(manifest))
    place.create()
    place.manifest.write_bytes(encode_manifest(manifest))
    snapshot = from_folder(home, run_id(manifest))
    assert set(snapshot.versions) == {0}
    assert snapshot.board is None
    expected = initial_parameters(manifest.table, manifest.model, manifest.seed)
    assert snapshot.theta.tobytes() == expected.tobytes()


def test_a_run_is_named_by_the_beginning_of_its_id_or_by_its_name(
    manifest: Manifest, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = home.run(run_id(manifest))
    place.create()
    place.manifest.write_bytes(encode_manifest(manifest))
    assert export(run_text(run_id(manifest))[:8], tmp_path / "one", home) == 0
    assert export(manifest.name, tmp_path / "two", home) == 0
    assert "version 0" in capsys.readouterr().out
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["hidden_size"] == manifest.model.dim
    with pytest.raises(UserError) as unknown:
        export("another", tmp_path / "three", home)
    assert unknown.value.number == "E042"
    assert manifest.name in unknown.value.fix


def test_a_name_of_two_runs_is_refused_with_both(manifest: Manifest, home: Home) -> None:
    for created in (1, 2):
        one = sign(msgspec.structs.replace(manifest, created_ms=created), ORGANISER)
        place = home.run(run_id(one))
        place.create()
        place.manifest.write_bytes(encode_manifest(one))
    with pytest.raises(UserError, match="names 2 of the runs"):
        export(manifest.name, home.root / "out", home)


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert safe_text("a\x1b[31mb\n\tc") == "a\N{REPLACEMENT CHARACTER}[31mb\n\tc"
