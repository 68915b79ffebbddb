"""The shape of the model that a run trains, without torch: sizes, tensors, and what they cost.

A decoder-only transformer in the manner of Llama (pre-norm RMSNorm, rotary positions, SwiGLU).
Tensor names are those of `transformers`' LlamaForCausalLM, so an export needs no renaming and no
permutation.
"""

from typing import Final

import msgspec

from dugnad.averaging.fragments import TensorSpec

BYTE_VALUES: Final = 256
"""Tokens are bytes by default; a smaller vocabulary could not name each of them."""
VOCAB_MAX: Final = 1 << 20
"""Four times the largest published vocabulary (256 k); beyond it a manifest is nonsense."""
WIDTH_MAX: Final = 1 << 16
"""Bound of dim and hidden in a foreign manifest; the largest published models stay under 54 k."""
LAYERS_MAX: Final = 1024
"""Bound of a foreign manifest; the deepest published models have about 130 layers."""
CONTEXT_MAX: Final = 1 << 20
"""Bound of a foreign manifest; attention over more is not a volunteer's work."""
BYTES_PER_PARAMETER: Final = 62
"""Parameters 4, gradient 4, Adam 8, anchors in the learner 4, three shared regions 12 and the
captured state 12, and in the daemon reference, residual, anchor and momentum 16: 60, and a little
for what is in flight."""
EVALUATING_BYTES_PER_PARAMETER: Final = 40
"""Parameters 4 and their shared region 4 in the learner; in the daemon 16, the agreed parameters of
two rounds 8, and one of these as a whole 4: 36, and a little for what is in flight."""
MERGING_BYTES_PER_PARAMETER: Final = 24
"""Without a learner: the daemon's 16, and a fragment that is merged or fetched."""
FLOAT_BYTES: Final = 4
NORM_EPSILON: Final = 1e-5
"""Added to the mean square in each RMSNorm, as in the published Llama models from 2 on."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model. ValueError (msgspec.ValidationError when decoded) names the field at
    fault.

    `kv_heads` None means as many as `heads`; fewer share keys and values between heads. `context`
    is the number of positions, in tokens. `tied` uses the embedding as output head.
    """

    dim: int
    layers: int
    heads: int
    hidden: int
    context: int
    vocab: int = BYTE_VALUES
    kv_heads: int | None = None
    rope_theta: float = 10_000.0
    tied: bool = True

    def __post_init__(self) -> None:
        _within("vocab", self.vocab, BYTE_VALUES, VOCAB_MAX)
        _within("dim", self.dim, 2, WIDTH_MAX)
        _within("layers", self.layers, 1, LAYERS_MAX)
        _within("heads", self.heads, 1, WIDTH_MAX)
        _within("hidden", self.hidden, 1, WIDTH_MAX)
        _within("context", self.context, 2, CONTEXT_MAX)
        _within("kv_heads", self.key_value_heads, 1, self.heads)
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim {self.dim} must be a multiple of 2 × heads = {2 * self.heads}: "
                "each head has an even width"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if not 1.0 <= self.rope_theta <= 1e9:
            raise ValueError(f"rope_theta {self.rope_theta} must lie between 1 and 1e9")

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    def tensor_specs(self) -> list[TensorSpec]:
        """Every parameter tensor in its fixed order: (name, shape, group of the merging rule).

        Groups: `embedding` (also the untied head, since its rows are tokens too), `matrix`,
        `vector`.
        """
        kv_dim = self.key_value_heads * self.head_dim
        specs = [TensorSpec("model.embed_tokens.weight", (self.vocab, self.dim), "embedding")]
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            specs += [
                TensorSpec(at + "input_layernorm.weight", (self.dim,), "vector"),
                TensorSpec(at + "self_attn.q_proj.weight", (self.dim, self.dim), "matrix"),
                TensorSpec(at + "self_attn.k_proj.weight", (kv_dim, self.dim), "matrix"),
                TensorSpec(at + "self_attn.v_proj.weight", (kv_dim, self.dim), "matrix"),
                TensorSpec(at + "self_attn.o_proj.weight", (self.dim, self.dim), "matrix"),
                TensorSpec(at + "post_attention_layernorm.weight", (self.dim,), "vector"),
                TensorSpec(at + "mlp.gate_proj.weight", (self.hidden, self.dim), "matrix"),
                TensorSpec(at + "mlp.up_proj.weight", (self.hidden, self.dim), "matrix"),
                TensorSpec(at + "mlp.down_proj.weight", (self.dim, self.hidden), "matrix"),
            ]
        specs.append(TensorSpec("model.norm.weight", (self.dim,), "vector"))
        if not self.tied:
            specs.append(TensorSpec("lm_head.weight", (self.vocab, self.dim), "embedding"))
        return specs

    def parameter_count(self) -> int:
        """Number of trained parameters; a tied head counts once."""
        kv_dim = self.key_value_heads * self.head_dim
        layer = 2 * self.dim * (self.dim + kv_dim) + 3 * self.dim * self.hidden + 2 * self.dim
        embeddings = self.vocab * self.dim * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.dim

    def activation_bytes(self, sequences: int) -> int:
        """Estimated bytes that one micro-batch of `sequences` keeps for its backward pass.

        Per layer about 16 tensors of width dim and 5 of width hidden, and three of the vocabulary's
        width for logits, their softmax and its gradient; all float32. Attention keeps no square
        matrix.
        """
        per_token = self.layers * (16 * self.dim + 5 * self.hidden) + 3 * self.vocab
        return sequences * self.context * per_token * FLOAT_BYTES

    def memory_bytes(self, sequences: int = 1) -> int:
        """Estimated bytes that a peer needs to train this model, daemon and learner together."""
        return BYTES_PER_PARAMETER * self.parameter_count() + self.activation_bytes(sequences)

    def evaluating_bytes(self) -> int:
        """Estimated bytes that a peer needs to evaluate this model, daemon and learner together."""
        forward = self.activation_bytes(1) // self.layers
        return EVALUATING_BYTES_PER_PARAMETER * self.parameter_count() + forward

    def merging_bytes(self) -> int:
        """Estimated bytes that a peer's daemon alone needs to keep up with this model."""
        return MERGING_BYTES_PER_PARAMETER * self.parameter_count()

    def flops_per_token(self) -> int:
        """Floating-point operations to train on one token: 6 a weight in a product, and attention.

        Attention looks back over half the context on average: 2 products × 2 × 3 × context / 2 ×
        dim.
        """
        lookups = self.vocab * self.dim * (0 if self.tied else 1)
        products = self.parameter_count() - lookups
        return 6 * products + 6 * self.layers * self.context * self.dim


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, and must lie between {low} and {high}")
