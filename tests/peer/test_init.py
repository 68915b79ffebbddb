"""Version 0: the same bits everywhere, whatever the fragment table."""

import hashlib

import numpy as np
import pytest

from dugnad.averaging.fragments import build_table
from dugnad.peer.init import initial_parameters
from dugnad.peer.modelconfig import ModelConfig

CONFIG = ModelConfig(dim=32, layers=2, heads=2, hidden=48, context=16, tied=False)
SPECS = CONFIG.tensor_specs()
GOLDEN = "3870df573c57c3b89d0ae97403576daf7083eabc457b6937faff1adfe439eb0c"


def test_version_0_is_the_recorded_bytes() -> None:
    flat = initial_parameters(build_table(SPECS, 3), CONFIG, 7)
    assert hashlib.sha256(flat.astype("<f4").tobytes()).hexdigest() == GOLDEN


def test_values_do_not_depend_on_how_the_table_cuts_tensors() -> None:
    few, many = build_table(SPECS, 1), build_table(SPECS, 9)
    one = few.unpack(initial_parameters(few, CONFIG, 3))
    other = many.unpack(initial_parameters(many, CONFIG, 3))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_spread_is_that_of_the_recipe_and_norms_are_one() -> None:
    table = build_table(SPECS, 2)
    named = table.unpack(initial_parameters(table, CONFIG, 3))
    assert named["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert named["lm_head.weight"].std() == pytest.approx(0.02, rel=0.02)
    gate = named["model.layers.0.mlp.gate_proj.weight"]
    assert gate.std() == pytest.approx(32**-0.5, rel=0.05)
    assert abs(gate.mean()) < 0.02
    down = named["model.layers.1.mlp.down_proj.weight"]
    assert down.std() == pytest.approx((48 * 4) ** -0.5, rel=0.05)
    assert (named["model.norm.weight"] == 1).all()


def test_seeds_and_tensors_give_different_values() -> None:
    table = build_table(SPECS, 2)
    one, other = (initial_parameters(table, CONFIG, seed) for seed in (0, 2**64 - 1))
    vectors = 5 * 32  # the norms, which are one under each seed
    assert (one == other).sum() == vectors
    named = table.unpack(one)
    q, k = (named[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert not (q == k).any()


def test_a_foreign_table_or_seed_is_refused() -> None:
    other = ModelConfig(dim=16, layers=1, heads=2, hidden=48, context=16)
    with pytest.raises(ValueError, match="other tensors"):
        initial_parameters(build_table(other.tensor_specs(), 1), CONFIG, 0)
    with pytest.raises(ValueError, match="seed"):
        initial_parameters(build_table(SPECS, 1), CONFIG, -1)
