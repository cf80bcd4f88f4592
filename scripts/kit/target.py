# SPDX-License-Identifier: Apache-2.0
"""The kit's target: DeepSeek V3's MLA decoder at Kimi K2's attention geometry, dense, small enough to commit.

Two forms of the same attention: `expanded` (per-head K and V, for training and for whole sequences) and `absorbed`
(queries projected into the latent, one shared KV head of 512 + 64), which is what a server's verify step computes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kit.layers import GatedMLP, RMSNorm, rope_angles, rotate_interleaved

Rope = tuple[Tensor, Tensor]  # cos and sin, as rope_angles gives them


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target; the field names are those of DeepSeek V3's config.json."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 50000.0
    max_position_embeddings: int = 262144

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one row of the KV pool: 512 latent + 64 rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def to_hf(self) -> dict[str, Any]:
        """config.json of a DeepseekV3ForCausalLM without experts: first_k_dense_replace covers every layer."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "rope_interleave": True,
            "rope_scaling": None,
            "first_k_dense_replace": self.num_hidden_layers,
            "moe_layer_freq": 1,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "torch_dtype": "bfloat16",
        }


class LatentAttention(nn.Module):
    """Multi-head latent attention. `cache` is one layer's KV pool, [batch, capacity, kv_lora_rank + rope]."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.num_attention_heads * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.latent_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        kv_width = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, kv_width, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, turn: Rope, cache: Tensor | None, start: int) -> Tensor:
        c, (cos, sin) = self.c, turn
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.num_attention_heads, -1))
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q_pe = rotate_interleaved(q_pe, cos[:, None], sin[:, None])
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        latent, k_pe = self.kv_a_layernorm(latent), rotate_interleaved(k_pe, cos, sin)
        if cache is None:
            out = self._expanded(q_nope, q_pe, latent, k_pe)
        else:
            end = start + x.shape[1]
            cache[:, start:end] = torch.cat((latent, k_pe), dim=-1)
            out = self._absorbed(q_nope, q_pe, cache[:, :end], start)
        return self.o_proj(out.flatten(-2))

    def _expanded(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, k_pe: Tensor) -> Tensor:
        c = self.c
        kv = self.kv_b_proj(latent).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_pe = k_pe[:, :, None].expand(-1, -1, c.num_attention_heads, -1)
        q, k = torch.cat((q_nope, q_pe), dim=-1), torch.cat((k_nope, k_pe), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.qk_head_dim**-0.5).transpose(1, 2)

    def _absorbed(self, q_nope: Tensor, q_pe: Tensor, rows: Tensor, start: int) -> Tensor:
        c = self.c
        weight = self.kv_b_proj.weight.to(rows.dtype).unflatten(0, (c.num_attention_heads, -1))
        w_k, w_v = weight.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q = torch.cat((torch.einsum("bthd,hdl->bthl", q_nope, w_k), q_pe), dim=-1)
        batch, tokens, heads, width = q.shape
        scores = q.reshape(batch, tokens * heads, width) @ rows.transpose(1, 2)  # all heads share the one KV row
        scores = scores.float().view(batch, tokens, heads, -1) * c.qk_head_dim**-0.5
        query = start + torch.arange(tokens, device=q.device)
        future = torch.arange(rows.shape[1], device=q.device) > query[:, None, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(rows.dtype)
        mixed = weights.view(batch, tokens * heads, -1) @ rows[..., : c.kv_lora_rank]
        return torch.einsum("bthl,hvl->bthv", mixed.view(batch, tokens, heads, -1), w_v)


class DecoderLayer(nn.Module):
    """Pre-norm residual block: latent attention, then the gated MLP."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.self_attn = LatentAttention(c)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, turn: Rope, cache: Tensor | None, start: int, dropout: float) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), turn, cache, start)
        x = x + F.dropout(attended, dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Backbone(nn.Module):
    """Embedding, layers and the final norm; `model.` in the checkpoint's names."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Target(nn.Module):
    """Causal language model. Parameters carry the names of a DeepseekV3ForCausalLM checkpoint."""

    def __init__(self, config: TargetConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        depth_scale = (2 * config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (depth_scale if residual else 1.0))

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> list[Tensor]:
        """One empty KV pool a layer, [batch, capacity, 576] of dtype, on the model's device."""
        shape = (batch, capacity, self.config.latent_dim)
        device = self.lm_head.weight.device
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in self.model.layers]

    def hidden(
        self,
        tokens: Tensor,
        taps: tuple[int, ...] = (),
        cache: list[Tensor] | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Final normed hidden state and the tapped features.

        tokens: int64 [batch, tokens], at positions start, start + 1, … of every row. taps: layer ids whose *output*
        (residual stream after the layer) is returned, concatenated to [batch, tokens, len(taps) * hidden].
        With a cache the absorbed form runs and the rows [start, start + tokens) of the cache are written.
        """
        c = self.config
        x = self.model.embed_tokens(tokens)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        turn = rope_angles(positions, c.qk_rope_head_dim, c.rope_theta)
        tapped = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, turn, None if cache is None else cache[i], start, self.dropout)
            if i in taps:
                tapped.append(x)
        return self.model.norm(x), torch.cat(tapped, dim=-1) if tapped else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocab] for int64 tokens [batch, tokens]."""
        return self.lm_head(self.hidden(tokens)[0])
