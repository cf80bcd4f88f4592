# SPDX-License-Identifier: Apache-2.0
"""The kit's DFlash drafter: a few layers that fill a block of mask tokens at once.

Semantics, as SGLang serves a DFlashDraftModel: the target's tapped features of the committed tokens are projected
once (`fc`, `hidden_norm`) and every layer turns them into keys and values directly; the block is the last
token (whose features are not known yet) followed by block_size - 1 mask tokens, embedded with the target's
embedding; inside the block attention is *not* causal; position i of the block predicts token i, through the
target's lm_head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kit.layers import GatedMLP, RMSNorm, rope_angles, rotate_halves


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of the drafter. rope_theta is the value SGLang assumes where a config has none."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 262144
    block_size: int = 8
    num_target_layers: int = 3
    target_layer_ids: tuple[int, ...] = (0, 1)
    mask_token_id: int = 3

    def __post_init__(self) -> None:
        last = self.num_target_layers - 1
        if not self.target_layer_ids or max(self.target_layer_ids) >= last or min(self.target_layer_ids) < 0:
            raise ValueError(
                f"target_layer_ids {self.target_layer_ids}: SGLang captures layer outputs 0 to {last - 1} of a target "
                f"of {self.num_target_layers} layers (the last layer's output is never captured)"
            )

    def to_hf(self) -> dict[str, Any]:
        """config.json of a DFlashDraftModel (its text part reads like Qwen3's)."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token": "<|MASK|>",
                "mask_token_id": self.mask_token_id,
            },
            "torch_dtype": "bfloat16",
        }


class BlockAttention(nn.Module):
    """Grouped-query attention of block tokens over context rows and over their own block."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V, [batch, kv heads, tokens, head_dim], for x at int64 positions [batch, tokens]."""
        k, v = self.k_norm(self._heads(self.k_proj(x))), self._heads(self.v_proj(x))
        cos, sin = rope_angles(positions[:, None], self.c.head_dim, self.c.rope_theta)
        return rotate_halves(k, cos, sin), v

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """visible: bool [batch, 1, block tokens, context rows + block tokens]."""
        q = self.q_norm(self._heads(self.q_proj(x)))
        q = rotate_halves(q, *rope_angles(positions[:, None], self.c.head_dim, self.c.rope_theta))
        k, v = (torch.cat(pair, dim=2) for pair in zip(context, self.key_value(x, positions), strict=True))
        group = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class BlockLayer(nn.Module):
    """Pre-norm residual block of the drafter."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(c)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, features: Tensor, at: Tensor, features_at: Tensor, visible: Tensor) -> Tensor:
        context = self.self_attn.key_value(features, features_at)
        x = x + self.self_attn(self.input_layernorm(x), at, context, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


def block_mask(anchors: Tensor, context: int, block: int) -> Tensor:
    """Who a block token sees: context rows before its anchor, and all of its own block.

    anchors: int64 [batch, blocks], position of each block's first token. Returns bool
    [batch, 1, blocks * block, context + blocks * block].
    """
    batch, blocks = anchors.shape
    rows = torch.arange(context, device=anchors.device)
    before = (rows < anchors[..., None]).repeat_interleave(block, dim=1)
    owner = torch.arange(blocks, device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner).expand(batch, -1, -1)
    return torch.cat((before, own), dim=-1)[:, None]


class Drafter(nn.Module):
    """Parameters carry the names of a DFlashDraftModel checkpoint; embedding and head are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, features: Tensor, anchors: Tensor, anchor_tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Hidden states of the blocks, [batch, blocks, block_size, hidden], ready for the target's lm_head.

        features: the target's taps, [batch, context, taps * hidden]; anchors: int64 [batch, blocks], positions of
        the blocks' first tokens; anchor_tokens: int64 [batch, blocks], those tokens.
        """
        c = self.config
        batch, blocks = anchors.shape
        tokens = torch.full((batch, blocks, c.block_size), c.mask_token_id, device=anchors.device)
        tokens[..., 0] = anchor_tokens
        x = embedding(tokens.flatten(1))
        at = (anchors[..., None] + torch.arange(c.block_size, device=anchors.device)).flatten(1)
        context = self.hidden_norm(self.fc(features))
        context_at = torch.arange(features.shape[1], device=anchors.device).expand(batch, -1)
        visible = block_mask(anchors, features.shape[1], c.block_size)
        for layer in self.layers:
            x = layer(x, context, at, context_at, visible)
        return self.norm(x).unflatten(1, (blocks, c.block_size))
