# SPDX-License-Identifier: Apache-2.0
"""What greedy chain speculation would accept, computed from one pass over finished greedy text.

Greedy decoding is deterministic, so the text a speculating server writes is the greedy text itself: the blocks drafted
at every position of it tell each step's acceptance, and a walk over them is the run the server would make.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kit.drafter import Drafter
from kit.target import Target


@dataclass(frozen=True)
class Acceptance:
    """tokens_per_step counts the bonus token (1 = nothing accepted); position_accuracy is of offsets 1, 2, …."""

    tokens_per_step: float
    steps: int
    position_accuracy: list[float]


@torch.no_grad()
def matches(target: Target, drafter: Drafter, tokens: Tensor, start: int, chunk: int = 64) -> Tensor:
    """bool [batch, positions, block_size - 1]: does the block drafted at position start + i predict the text?

    tokens: int64 [batch, length]; the positions are start … length - block_size.
    """
    c = drafter.config
    _, features = target.hidden(tokens, taps=c.target_layer_ids)
    assert features is not None
    anchors = torch.arange(start, tokens.shape[1] - c.block_size + 1, device=tokens.device)
    hits = []
    for part in anchors.split(chunk):
        at = part.expand(tokens.shape[0], -1)
        blocks = drafter(features, at, tokens.gather(1, at), target.model.embed_tokens)
        drafted = target.lm_head(blocks[:, :, 1:]).argmax(-1)
        hits.append(drafted == tokens.unfold(1, c.block_size, 1)[:, part, 1:])
    return torch.cat(hits, dim=1)


def walk(hits: Tensor) -> Acceptance:
    """Follows the speculative run through hits, bool [batch, positions, block_size - 1]."""
    accepted = hits.long().cumprod(-1).sum(-1).tolist()
    steps = committed = 0
    for row in accepted:
        at = 0
        while at < len(row):
            committed += row[at] + 1
            steps += 1
            at += row[at] + 1
    accuracy = hits.flatten(0, 1).double().mean(0).tolist()
    return Acceptance(committed / steps, steps, [round(value, 4) for value in accuracy])
