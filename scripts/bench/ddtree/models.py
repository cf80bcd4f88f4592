# SPDX-License-Identifier: Apache-2.0
"""Configs of a target and its DFlash drafter for random weights (`load_format` dummy): only their times mean anything.

The target has the attention of one GPU's share of a large MLA model (8 of 64 heads, latent of 512 + 64), eight layers
of it, and mixture-of-experts layers small enough to load in seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .modes import BLOCK

LAYERS, HIDDEN, VOCABULARY, LONGEST = 8, 2048, 32000, 1 << 18

TARGET: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # attention
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 50000.0,
    "attention_bias": False,
    # experts
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": BLOCK,
    "num_target_layers": LAYERS,
    "dflash_config": {"target_layer_ids": [1, LAYERS - 2], "mask_token_id": 3},
}


def write(
    folder: Path, vocabulary: int = VOCABULARY, dense: bool = False, block: int = BLOCK
) -> tuple[Path, Path]:
    """Writes FOLDER/target/config.json and FOLDER/draft/config.json; returns the two models' folders.

    Args:
        vocabulary: token ids of both.
        dense: no layer has experts, so that rounding cannot choose others.
        block: tokens of the drafter's block.
    """
    own = {"first_k_dense_replace": LAYERS} if dense else {}
    target, draft = folder / "target", folder / "draft"
    for model, config in ((target, {**TARGET, **own}), (draft, {**DRAFT, "block_size": block})):
        model.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**config, "vocab_size": vocabulary}, indent=1) + "\n"
        (model / "config.json").write_text(text, encoding="utf-8")
    return target, draft
