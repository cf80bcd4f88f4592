# SPDX-License-Identifier: Apache-2.0
"""A tiny grouped-query target (Qwen3) and a DFlash drafter for it, random weights, the same for the same seed.

    python3 tests/e2e/tiny_gqa.py OUT        (OUT/target, OUT/draft)

The vocabulary is so small that trees cover what the target may say next, so drafts are accepted although nothing was
trained; attention is sharp, so the text depends on the whole prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts")]

from kit import checkpoint  # noqa: E402
from kit.drafter import Drafter, DrafterConfig  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD = 8, 256, 512, 3, 4, 2, 128
SHARPNESS = 3.0
"""Weight of the query and key norms: scores have a standard deviation of its square."""
LOGITS = 1.5
"""Standard deviation of a token's logits."""
NO_REPEATS = 2.0
"""How much a token's own embedding speaks against it as the next one; without it greedy text soon repeats one token."""
FLATNESS = 0.4
"""Factor on the drafter's logits: its trees are broad rather than deep."""


def target_config() -> dict[str, Any]:
    """config.json of a Qwen3ForCausalLM."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu", "attention_bias": False,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip


def target_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A Qwen3 state dict in bf16. Projections keep the size of what they are given."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, LOGITS) - NO_REPEATS * HIDDEN**-0.5 * embedding,
    }
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": matrix(HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD),
            "self_attn.q_norm": torch.full((HEAD,), SHARPNESS),
            "self_attn.k_norm": torch.full((HEAD,), SHARPNESS),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
        }
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def drafter(seed: int) -> Drafter:
    """A DFlash drafter that knows nothing."""
    torch.manual_seed(seed)
    config = DrafterConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_target_layers=LAYERS, max_position_embeddings=8192,
        mask_token_id=2,
    )  # fmt: skip
    model = Drafter(config)
    model.norm.weight.data.fill_(FLATNESS)
    return model


def write(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Writes both models; returns the folders of the target and of the drafter."""
    target, draft = folder / "target", folder / "draft"
    target.mkdir(parents=True, exist_ok=True)
    weights = target_weights(torch.Generator().manual_seed(seed))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(target_config(), indent=1) + "\n")
    checkpoint.save(drafter(seed), draft)
    return target, draft


def prompts(lengths: tuple[int, ...], per_length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        for _ in range(per_length)
        for length in lengths
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(*write(args.out, args.seed), sep="\n")


if __name__ == "__main__":
    main()
