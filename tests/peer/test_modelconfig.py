"""The model's shape: what is refused, and what it counts."""

import msgspec
import pytest

from dugnad.averaging.fragments import build_table
from dugnad.peer.modelconfig import ModelConfig

SMALL = ModelConfig(dim=16, layers=2, heads=4, hidden=24, context=8)


def test_tensor_names_and_order_are_those_of_llama() -> None:
    untied = msgspec.structs.replace(SMALL, tied=False, kv_heads=2)
    specs = {spec.name: (spec.shape, spec.group) for spec in untied.tensor_specs()}
    assert next(iter(specs)) == "model.embed_tokens.weight"
    assert list(specs)[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert specs["model.layers.1.self_attn.q_proj.weight"] == ((16, 16), "matrix")
    assert specs["model.layers.1.self_attn.k_proj.weight"] == ((8, 16), "matrix")
    assert specs["model.layers.0.mlp.down_proj.weight"] == ((16, 24), "matrix")
    assert specs["model.layers.0.input_layernorm.weight"] == ((16,), "vector")
    assert specs["lm_head.weight"] == ((256, 16), "embedding")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_parameter_count_is_the_sum_of_the_tensors(tied: bool, kv_heads: int | None) -> None:
    config = msgspec.structs.replace(SMALL, tied=tied, kv_heads=kv_heads)
    assert config.parameter_count() == build_table(config.tensor_specs(), 3).total


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dim", 20),
        ("heads", 3),
        ("kv_heads", 3),
        ("kv_heads", 8),
        ("vocab", 255),
        ("layers", 0),
        ("context", 1),
        ("rope_theta", float("nan")),
    ],
)
def test_impossible_sizes_are_refused_by_name(field: str, value: float) -> None:
    fields = msgspec.to_builtins(SMALL) | {field: value}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(fields, ModelConfig)


def test_costs_grow_with_what_they_measure() -> None:
    larger = msgspec.structs.replace(SMALL, layers=4)
    assert larger.flops_per_token() > SMALL.flops_per_token() > 6 * 2000
    assert larger.memory_bytes() > SMALL.memory_bytes() > 48 * SMALL.parameter_count()
    assert SMALL.memory_bytes(8) - SMALL.memory_bytes(1) == SMALL.activation_bytes(7)
