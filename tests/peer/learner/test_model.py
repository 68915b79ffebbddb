"""The transformer computes what Llama computes, and its parameters move by fragments."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dugnad.averaging.fragments import build_table
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.model import Transformer
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.modelconfig import ModelConfig

CONFIGS = [
    ModelConfig(dim=32, layers=2, heads=4, hidden=40, context=12),
    ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=40, context=12, tied=False),
]
Array = npt.NDArray[np.float64]


def norm(x: Array, weight: Array) -> Array:
    out: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return out


def turned(x: Array, theta: float) -> Array:
    """Llama's rotary positions on x (time, head_dim), one pair (i, i + half) at a time."""
    half = x.shape[1] // 2
    out = np.empty_like(x)
    for time in range(x.shape[0]):
        for i in range(half):
            angle = time / theta ** (2 * i / x.shape[1])
            a, b = x[time, i], x[time, i + half]
            out[time, i] = a * np.cos(angle) - b * np.sin(angle)
            out[time, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(x: Array, w: dict[str, Array], at: str, config: ModelConfig) -> Array:
    q, k, v = (x @ w[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv")
    width, group = config.head_dim, config.heads // config.key_value_heads
    heads = []
    for head in range(config.heads):
        mine = slice(head * width, (head + 1) * width)
        theirs = slice(head // group * width, (head // group + 1) * width)
        scores = turned(q[:, mine], config.rope_theta) @ turned(k[:, theirs], config.rope_theta).T
        scores = np.where(np.tri(len(x), dtype=bool), scores / np.sqrt(width), -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, theirs])
    out: Array = np.concatenate(heads, 1) @ w[f"{at}.self_attn.o_proj.weight"].T
    return out


def plain_logits(tokens: list[int], w: dict[str, Array], config: ModelConfig) -> Array:
    """Llama in numpy, written from its definition."""
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        x = x + attention(norm(x, w[f"{at}.input_layernorm.weight"]), w, at, config)
        y = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        up = y @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if config.tied else w["lm_head.weight"]
    out: Array = norm(x, w["model.norm.weight"]) @ head.T
    return out


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_are_those_of_llama_written_in_numpy(config: ModelConfig) -> None:
    table = build_table(config.tensor_specs(), 3)
    flat = initial_parameters(table, config, 5)
    flat *= np.random.default_rng(0).uniform(0.5, 2.0, flat.size).astype(np.float32)
    model = FlatModel(config, table, torch.device("cpu"))
    model.load(flat)
    tokens = [7, 200, 7, 0, 255, 31, 99]
    named = {name: array.astype(np.float64) for name, array in table.unpack(flat).items()}
    with torch.no_grad():
        ours = model.network(torch.tensor([tokens]))[0].numpy()
    np.testing.assert_allclose(ours, plain_logits(tokens, named, config), atol=2e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_tensors_have_the_names_and_shapes_of_the_specs(config: ModelConfig) -> None:
    shapes = {name: tuple(p.shape) for name, p in Transformer(config).state_dict().items()}
    assert shapes == {spec.name: spec.shape for spec in config.tensor_specs()}


@pytest.mark.parametrize("count", [1, 4, 9])
def test_fragments_come_out_as_they_went_in(count: int) -> None:
    config = CONFIGS[1]
    table = build_table(config.tensor_specs(), count)
    flat = initial_parameters(table, config, 1)
    model = FlatModel(config, table, torch.device("cpu"))
    model.load(flat)
    out = np.zeros_like(flat)
    for fragment in range(count):
        model.copy_out(fragment, out)
    assert np.array_equal(out, flat)
    delta = np.linspace(-1, 1, flat.size, dtype=np.float32)
    for fragment in range(count):
        model.add_in(fragment, delta)
        model.copy_out(fragment, out)
    assert np.array_equal(out, flat + delta)


def test_matrices_lie_first_and_gradients_lie_like_parameters() -> None:
    config = CONFIGS[1]
    table = build_table(config.tensor_specs(), 3)
    model = FlatModel(config, table, torch.device("cpu"))
    model.load(initial_parameters(table, config, 1))
    gradient = model.flat_gradient()
    groups = {spec.name: spec.group for spec in config.tensor_specs()}
    for name, parameter in model.network.named_parameters():
        assert (parameter.storage_offset() < model.decayed) == (groups[name] == "matrix")
        assert parameter.grad is not None
        assert parameter.grad.storage_offset() == parameter.storage_offset()
    model.network.loss_sum(torch.zeros((1, 5), dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]  # torch's own
    assert gradient.abs().sum() > 0


def test_a_table_of_another_model_is_refused() -> None:
    table = build_table(CONFIGS[0].tensor_specs(), 2)
    with pytest.raises(ValueError, match="other tensors"):
        FlatModel(CONFIGS[1], table, torch.device("cpu"))
