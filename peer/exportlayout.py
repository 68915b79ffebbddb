"""The agreed model as the files that transformers' Llama loads, without torch or transformers.

Our tensors have Llama's names and its conventions (rotate-half rotary positions, SwiGLU, RMSNorm),
so nothing is permuted. The tokenizer is the bytes of UTF-8: token b is byte b. In `tokenizer.json`
that is a byte-level BPE without a single merge, whose 256 symbols stand for the bytes.
"""

from __future__ import annotations

import json
from typing import Final

import numpy as np
from safetensors.numpy import save

from dugnad.averaging.tree import Vector
from dugnad.peer.manifest import Manifest
from dugnad.peer.modelconfig import BYTE_VALUES, NORM_EPSILON, ModelConfig

TENSORS: Final = "model.safetensors"
CONFIG: Final = "config.json"
_PLAIN: Final = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that byte-level tokenizers write as the character of that number; the others, in order,
as the characters from U+0100 on (tokenizers' ByteLevel)."""


def layout_files(manifest: Manifest, theta: Vector) -> dict[str, bytes]:
    """Name -> content of everything but the card. ``theta`` is the flat vector of all fragments.

    ValueError when a parameter is not finite: such a model is of no use to anybody.
    """
    if not np.isfinite(theta).all():
        raise ValueError("a parameter of the model is not a finite number")
    model = manifest.model
    tensors = {
        name: np.ascontiguousarray(part) for name, part in manifest.table.unpack(theta).items()
    }
    return {
        CONFIG: _json(llama_config(model)),
        "generation_config.json": _json({"_from_model_config": True, "do_sample": True}),
        "tokenizer.json": _json(byte_tokenizer()),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": model.context,
                "clean_up_tokenization_spaces": False,
            }
        ),
        TENSORS: save(tensors, {"format": "pt"}),
    }


def llama_config(model: ModelConfig) -> dict[str, object]:
    """The fields of transformers' LlamaConfig, in the words of both its 4.x and 5.x."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def byte_symbols() -> list[str]:
    """The character that stands for each byte value in a byte-level vocabulary."""
    plain = {byte for part in _PLAIN for byte in part}
    strange = [byte for byte in range(BYTE_VALUES) if byte not in plain]
    return [
        chr(byte) if byte in plain else chr(BYTE_VALUES + strange.index(byte))
        for byte in range(BYTE_VALUES)
    ]


def byte_tokenizer() -> dict[str, object]:
    """The content of `tokenizer.json`: one token a byte, in both directions without loss."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
