"""Run files: what is wrong with them is said with the key, the line and the fix."""

from pathlib import Path

import pytest

from dugnad.dht.ids import PeerId, peer_text
from dugnad.peer.errors import UserError
from dugnad.peer.runfile import (
    EXAMPLE_RUN,
    RunFile,
    data_folder,
    default_run,
    load_run_file,
    parse_run_file,
)


def changed(old: str, new: str) -> str:
    """The example with one line changed."""
    assert EXAMPLE_RUN.count(old) == 1, old
    return EXAMPLE_RUN.replace(old, new)


def refused(text: str) -> UserError:
    """The error that `text` gives."""
    with pytest.raises(UserError) as caught:
        parse_run_file(text, "run.toml")
    return caught.value


def test_the_example_is_a_run_file_that_says_every_key() -> None:
    run = default_run()
    assert run.data.source == "sotu"
    optional = {"vocab", "kv_heads", "rope_theta", "tied"}
    for name, section in RunFile.model_fields.items():
        assert section.annotation is not None
        for key in section.annotation.model_fields:
            assert key in optional or f"\n{key} =" in EXAMPLE_RUN, f"{name}.{key}"


def test_what_is_left_out_is_what_the_example_says() -> None:
    bare = EXAMPLE_RUN[: EXAMPLE_RUN.index("[train]")] + "[train]\nwarmup_tokens = 200_000\n"
    assert parse_run_file(bare).exchange == default_run().exchange
    assert parse_run_file(bare).train == default_run().train


def test_the_optimiser_follows_the_train_section() -> None:
    optimiser = default_run().optimiser()
    assert optimiser.total_tokens == 50_000_000
    assert optimiser.learning_rate * optimiser.final_fraction == pytest.approx(2e-4)
    assert (optimiser.beta1, optimiser.beta2, optimiser.batch_sequences) == (0.9, 0.95, 8)


def test_admitted_peers_are_keys_in_order() -> None:
    keys = [PeerId(bytes([i]) * 32) for i in (9, 3, 9)]
    listed = ", ".join(f'"{peer_text(key)}"' for key in keys)
    run = parse_run_file(changed('admission = "open"', f"admission = [{listed}]"))
    assert run.run.admitted() == (bytes([3]) * 32, bytes([9]) * 32)
    assert default_run().run.admitted() == ()


@pytest.mark.parametrize(
    ("old", "new", "said", "fix"),
    [
        ("heads = 4", "heads = 3", "line 11: [model] heads 3 does not divide dim 128", ""),
        ("heads = 4", "head = 4", "'head' is not a key of [model] (did you mean 'heads'?)", "dim"),
        ("dim = 128 ", "dim = 100", "rotary positions need heads of even width: try dim 96", ""),
        ("dim = 128 ", "dim = 128.0", "line 12: model.dim is 128.0 and should be a", "model.dim"),
        ("dim = 128 ", 'dim = "big"', "model.dim is 'big' and should be", "model.dim"),
        ("layers = 4", "layers = 0", "model.layers is 0 and should be greater than", "layers"),
        ("layers = 4", "", "model.layers is missing", "--example"),
        ("rule = ", "rule = 'median' # ", "exchange.rule is 'median' and should be 'mean'", ""),
        ("hand_in_codec = ", "hand_in_codec = 'int9' # ", "(did you mean 'int8'?)", ""),
        ("commit_codec = ", "commit_codec = 'topk-25' # ", "use float32, float16, int8, int4", ""),
        ("merge_floor_s = 1.0", "merge_floor_s = 0.0", "exchange.merge_floor_s is 0.0", ""),
        ("merge_floor_s = 1.0", "merge_floor_s = nan", "exchange.merge_floor_s is nan", ""),
        ("outer_momentum = 0.0", "outer_momentum = 1.0", "less than 1", ""),
        ("fragments = 4 ", "fragments = 4000 ", "less than or equal to 1024", ""),
        ("horizon = 4", "horizon = 1", "horizon 1 must be at least staleness 2", ""),
        ("unit_sequences = 64", "unit_sequences = 63", "must be a multiple of batch_sequences", ""),
        ("betas = [0.9, 0.95]", "betas = [0.9, 1.5]", "between 0 and 0.9999", ""),
        ("betas = [0.9, 0.95]", "betas = [0.9]", "train.betas is [0.9]", ""),
        ("min_learning_rate = 2e-4", "min_learning_rate = 1", "is above learning_rate", ""),
        ("warmup_tokens = 200_000", "warmup_tokens = 60_000_000", "beyond the end", ""),
        ("token_budget = 50_000_000", "token_budget = 500", "less than one step", ""),
        ("token_budget = 50_000_000", "token_budget = -1", "run.token_budget is -1", ""),
        ('admission = "open"', 'admission = "closed"', "run.admission is 'closed'", ""),
        ('admission = "open"', 'admission = ["12D3"]', "'12D3' is not a peer id", ""),
        ('name = "State of the Union"', 'name = "a\\u202eb"', "name has control or", ""),
        ('name = "State of the Union"', 'name = "  "', "name is empty", ""),
        ("[run]", "[runs]\nx = 1\n[run]", "'runs' is not a key of the run file", "run, model"),
        ("[data]", "[date]", "'date' is not a key of the run file (did you mean 'data'?) (and", ""),
        ("held_out = 0.02", "held_out = 0.9", "data.held_out is 0.9", ""),
        ("seed = 1", "seed = 9223372036854775808", "run.seed is 9223372036854775808", ""),
    ],
)
def test_an_impossible_run_file_is_explained(old: str, new: str, said: str, fix: str) -> None:
    error = refused(changed(old, new))
    assert error.number == "E012"
    assert said in error.sentence
    assert fix in error.fix
    assert error.fix


def test_more_fragments_than_rows_are_refused() -> None:
    text = changed("dim = 128 ", "dim = 8 ").replace("layers = 4", "layers = 1")
    error = refused(text.replace("fragments = 4 ", "fragments = 1024 "))
    assert "cannot fill" in error.sentence


def test_a_missing_section_is_named() -> None:
    error = refused(EXAMPLE_RUN[: EXAMPLE_RUN.index("[data]")])
    assert "the section [data] is missing" in error.sentence


def test_the_line_of_a_wrong_key_is_named() -> None:
    text = changed("steps_per_merge = 24 ", "steps_per_merge = 0 ")
    line = next(i for i, one in enumerate(text.splitlines(), 1) if "steps_per_merge = 0" in one)
    assert f"run.toml, line {line}:" in refused(text).sentence


def test_what_is_not_toml_is_refused_with_its_place() -> None:
    error = refused("[run]\nname = State of the Union\n")
    assert error.number == "E011"
    assert "line 2" in error.sentence


def test_an_unreadable_run_file_is_its_own_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UserError) as caught:
            load_run_file(path)
        assert caught.value.number == "E010"


def test_a_binary_file_is_not_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError) as caught:
        load_run_file(tmp_path / "run.toml")
    assert caught.value.number == "E011"


def test_the_data_folder_lies_beside_the_run_file(tmp_path: Path) -> None:
    run = parse_run_file(changed('source = "sotu"', 'source = "texts"'))
    path = tmp_path / "run.toml"
    with pytest.raises(UserError, match="there is no folder") as missing:
        data_folder(run, path)
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    with pytest.raises(UserError, match="is empty") as empty:
        data_folder(run, path)
    assert missing.value.number == empty.value.number == "E020"
    (tmp_path / "texts" / "inner" / "a.txt").write_text("a")
    assert data_folder(run, path) == tmp_path / "texts"
    assert data_folder(default_run(), path) is None
