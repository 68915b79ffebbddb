"""Version 0 of a run's parameters: the same bytes on every machine, from one integer seed.

Nothing here calls libm: a counter-based integer generator (splitmix64), exact conversions to
float32, one multiplication, and bounds made with division and square root only, which IEEE 754
rounds correctly.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.fragments import FragmentTable
from dugnad.peer.modelconfig import ModelConfig

EMBEDDING_STD: Final = 0.02
"""Standard deviation of embeddings and of an untied head, as in GPT-2 and Llama."""
SEED_MAX: Final = (1 << 64) - 1
RESIDUAL_OUTPUTS: Final = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Matrices that write to the residual stream: 2 a layer, so each is scaled by 1/√(2·layers)
(GPT-2)."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # splitmix64, Steele, Lea and Flood 2014
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_CHUNK: Final = 1 << 20
"""Elements made at a time, so that the integers take megabytes and not gigabytes."""


def initial_parameters(
    table: FragmentTable, config: ModelConfig, seed: int
) -> npt.NDArray[np.float32]:
    """The flat float32 vector of version 0, laid out fragment after fragment as `table` says.

    An element's value depends on the seed, its tensor's number and its place in the tensor, not on
    how the table cuts tensors. ValueError if the table is not of this model or the seed is not 64
    bits.
    """
    if not 0 <= seed <= SEED_MAX:
        raise ValueError(f"seed {seed} must lie between 0 and 2^64 - 1")
    if list(table.tensors) != config.tensor_specs():
        raise ValueError("the fragment table lists other tensors than the model has")
    flat = np.empty(sum(table.sizes), np.float32)
    for offset, fragment in zip(table.offsets, table.fragments, strict=True):
        at = offset
        for piece in fragment.slices:
            name = table.tensors[piece.tensor].name
            key = _key(seed, piece.tensor)
            for start in range(piece.start, piece.stop, _CHUNK):
                stop = min(start + _CHUNK, piece.stop)
                flat[at : at + stop - start] = _values(
                    key, start, stop, _bound(name, table.tensors[piece.tensor].shape, config.layers)
                )
                at += stop - start
    return flat


def _bound(name: str, shape: tuple[int, ...], layers: int) -> np.float32 | None:
    """Half-width of the uniform distribution (√3 × its standard deviation); None: all ones."""
    if len(shape) == 1:
        return None
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return np.float32(EMBEDDING_STD * math.sqrt(3.0))
    variance = 1.0 / shape[1]
    if name.endswith(RESIDUAL_OUTPUTS):
        variance /= 2.0 * layers
    return np.float32(math.sqrt(3.0 * variance))


def _key(seed: int, tensor: int) -> np.uint64:
    """The state from which a tensor's stream counts: two rounds of mixing keep streams apart."""
    numbers = np.array([seed], np.uint64)
    return np.uint64(_mix(_mix(numbers) + np.uint64(tensor))[0])


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of splitmix64 for each element; array arithmetic wraps modulo 2^64."""
    z = numbers + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def _values(
    key: np.uint64, start: int, stop: int, bound: np.float32 | None
) -> npt.NDArray[np.float32]:
    """Elements start to stop of a stream: uniform in (-bound, bound), symmetric, never zero."""
    if bound is None:
        return np.ones(stop - start, np.float32)
    counters = np.arange(start, stop, dtype=np.uint64) * _GOLDEN + key
    top = (_mix(counters) >> np.uint64(40)).astype(np.int64)  # 24 bits
    odd = (2 * top + 1 - (1 << 24)).astype(np.float32)  # |odd| < 2^24: exact in float32
    return odd * np.float32(2.0**-24) * bound
