"""The language model: a decoder-only transformer whose tensors are those of LlamaForCausalLM.

Pre-norm RMSNorm, rotary positions (the rotate-half convention), SwiGLU, no biases, tied or untied
head. Module names give the tensor names of `ModelConfig.tensor_specs`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dugnad.peer.modelconfig import NORM_EPSILON, ModelConfig


class Norm(nn.Module):
    """RMSNorm with a learned scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → (…, dim)."""
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPSILON)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several heads may share keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.key_value_heads
        self.head_dim = config.head_dim
        kv_dim = self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, time, dim); cos and sin (time, head_dim)."""
        batch, time, dim = x.shape
        q = self.q_proj(x).view(batch, time, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, time, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_heads != self.heads:  # query head h uses key head h // group, as in Llama
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, time, dim))
        return out


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) × up(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim) → (…, dim)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention, then MLP, each on a normed copy and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.dim)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.dim)
        self.mlp = Mlp(config.dim, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, time, dim)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and the last norm: `model.` in the tensor names."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = Norm(config.dim)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, time) → (batch, time, dim)."""
        x: Tensor = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Transformer(nn.Module):
    """The whole model. Parameters are uninitialised noise until the caller fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, time ≤ context), int64 → logits (batch, time, vocab)."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.model(tokens), head.weight)

    def loss_sum(self, windows: Tensor) -> Tensor:
        """windows (batch, context + 1), int64 → sum of the losses of its batch × context tokens, in
        nats.
        """
        logits = self(windows[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (context, head_dim): position × theta^(-2i / head_dim), the angles written
    twice.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x (batch, heads, time, head_dim) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
