# SPDX-License-Identifier: Apache-2.0
"""Penalties of the tokens on a node's own path, exactly as if the path had been written token by token.

SGLang's penalizers hold a state a request: what was written before the root of this step. A node is penalised for that,
and for the tokens from the root to itself. Committed tokens go into the state afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

    from .tree import DraftTree


def apply(orchestrator: BatchedPenalizerOrchestrator, tree: DraftTree, logits: torch.Tensor) -> None:
    """Penalises the logits after every node, in place.

    Args:
        orchestrator: of the bs requests; its state ends before the roots.
        tree: their trees.
        logits: fp32 [bs, n, V].
    """
    path = tree.visible()
    new = _first_on_path(tree.tokens, path)
    index = tree.tokens[:, None].expand_as(path)  # [bs, n, n]: token j, for every node i
    frequency, presence, repetition, least = _states(orchestrator)
    if frequency is not None:
        logits.sub_(frequency.cumulated_frequency_penalties[:, None])
        logits.scatter_add_(2, index, -frequency.frequency_penalties[:, None] * path)
    if presence is not None:
        unseen = presence.cumulated_presence_penalties.gather(1, tree.tokens) == 0
        logits.sub_(presence.cumulated_presence_penalties[:, None])
        logits.scatter_add_(2, index, -presence.presence_penalties[:, None] * (path & (new & unseen)[:, None]))
    if repetition is not None:
        unseen = repetition.cumulated_repetition_penalties.gather(1, tree.tokens) == 1
        _scale(logits, repetition.cumulated_repetition_penalties[:, None])
        before = logits.gather(2, index)
        after = before.clone()
        _scale(after, repetition.repetition_penalties[:, None].expand_as(after))
        counts = path & (new & unseen)[:, None] & before.isfinite()
        logits.scatter_add_(2, index, torch.where(counts, after - before, 0.0))
    if least is not None:
        written = least.len_output_tokens + 1 + tree.depths
        too_early = (written < least.min_new_tokens)[:, :, None]
        logits.add_(torch.where(too_early, least.stop_token_penalties[:, None], 0.0))


def commit(orchestrator: BatchedPenalizerOrchestrator, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
    """Takes the committed tokens into the state.

    Args:
        orchestrator: of the bs requests.
        tokens: int64 [bs, k], root first; entries past a request's length repeat one before.
        lengths: int64 [bs], from 1.
    """
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    frequency, presence, repetition, least = _states(orchestrator)
    if frequency is not None:
        frequency.cumulated_frequency_penalties.scatter_add_(1, tokens, frequency.frequency_penalties * real)
    if presence is not None:
        presence.cumulated_presence_penalties.scatter_(1, tokens, presence.presence_penalties.expand_as(real))
    if repetition is not None:
        repetition.cumulated_repetition_penalties.scatter_(1, tokens, repetition.repetition_penalties.expand_as(real))
    if least is not None:
        least.len_output_tokens.add_(lengths[:, None].to(least.len_output_tokens.dtype))


def _states(orchestrator: BatchedPenalizerOrchestrator) -> list[Any]:
    """The penalizer of each kind, None where no request of the batch asks for it."""
    kinds = (
        BatchedFrequencyPenalizer,
        BatchedPresencePenalizer,
        BatchedRepetitionPenalizer,
        BatchedMinNewTokensPenalizer,
    )
    found = [orchestrator.penalizers.get(kind) for kind in kinds]
    return [state if state is not None and state.is_prepared() else None for state in found]


def _first_on_path(tokens: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """bool [bs, n]: no ancestor of the node holds the same token."""
    same = tokens[:, :, None] == tokens[:, None]
    return (same & path).sum(-1) == 1


def _scale(logits: torch.Tensor, by: torch.Tensor) -> None:
    logits.copy_(torch.where(logits < 0, logits * by, logits / by))
