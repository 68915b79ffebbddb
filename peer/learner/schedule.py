"""How a run's learners step: AdamW's settings, and the learning rate as a function of the swarm's
tokens.
"""

import math
from typing import Literal

import msgspec


class OptimiserSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inner optimiser of every learner. ValueError (ValidationError when decoded) says what is
    wrong.

    The rate rises to `learning_rate` over `warmup_tokens` of the whole swarm, then falls by `decay`
    to `final_fraction` of it at `total_tokens`. Weight decay applies to matrices only. One step
    takes `batch_sequences` sequences of the model's context.
    """

    total_tokens: int
    learning_rate: float = 1e-3
    final_fraction: float = 0.1
    warmup_tokens: int = 0
    decay: Literal["cosine", "linear", "none"] = "cosine"
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    batch_sequences: int = 8

    def __post_init__(self) -> None:
        _between("learning_rate", self.learning_rate, 0.0, 10.0)
        _between("final_fraction", self.final_fraction, 0.0, 1.0)
        _between("beta1", self.beta1, 0.0, 0.9999)
        _between("beta2", self.beta2, 0.0, 0.99999)
        _between("epsilon", self.epsilon, 1e-16, 1.0)
        _between("weight_decay", self.weight_decay, 0.0, 10.0)
        _between("clip_norm", self.clip_norm, 1e-6, 1e6)
        _between("batch_sequences", self.batch_sequences, 1, 65_536)
        _between("total_tokens", self.total_tokens, 1, 1 << 60)
        _between("warmup_tokens", self.warmup_tokens, 0, self.total_tokens)


def learning_rate(settings: OptimiserSettings, tokens: int) -> float:
    """The rate of the step that brings the swarm to `tokens`. Flat at the end beyond the budget."""
    if tokens < settings.warmup_tokens:
        return settings.learning_rate * tokens / settings.warmup_tokens
    if settings.decay == "none":
        return settings.learning_rate
    falling = max(1, settings.total_tokens - settings.warmup_tokens)
    done = min(1.0, (tokens - settings.warmup_tokens) / falling)
    left = 1.0 - done if settings.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    share = settings.final_fraction + (1.0 - settings.final_fraction) * left
    return settings.learning_rate * share


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name} is {value}, and must lie between {low} and {high}")
