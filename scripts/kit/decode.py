# SPDX-License-Identifier: Apache-2.0
"""Batched decoding with the absorbed form and a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kit.target import Target


@torch.no_grad()
def generate(
    target: Target,
    prompts: Tensor,
    new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prompts with new_tokens more tokens, int64 [batch, prompt + new_tokens].

    prompts: int64 [batch, prompt]. Greedy at temperature 0, else sampled with generator. Runs in the dtype of the
    target's weights.
    """
    batch, start = prompts.shape
    tokens = torch.cat((prompts, prompts.new_zeros(batch, new_tokens)), dim=1)
    cache = target.new_cache(batch, start + new_tokens, target.lm_head.weight.dtype)
    fresh, at = prompts, 0
    for end in range(start, start + new_tokens):
        hidden, _ = target.hidden(fresh, cache=cache, start=at)
        logits = target.lm_head(hidden[:, -1]).float()
        if temperature > 0:
            fresh = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            fresh = logits.argmax(-1, keepdim=True)
        tokens[:, end : end + 1] = fresh
        at = end
    return tokens
