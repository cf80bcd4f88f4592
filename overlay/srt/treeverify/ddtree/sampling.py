# SPDX-License-Identifier: Apache-2.0
"""The target's own token after every node of a tree, drawn as SGLang draws a token where nothing is drafted.

A draft token is accepted where it is the token that the target drew (arXiv 2604.12989, section 4). No probability of
the drafter enters, so whatever the tree, the output has the target's law; greedy output is the target's argmax.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from . import penalties

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from .tree import DraftTree

ROWS = 1024
"""Nodes whose tokens are drawn at a time: probabilities take memory of the logits' size."""


def predict(
    output: LogitsProcessorOutput, sampling: SamplingBatchInfo, tree: DraftTree, sampler: Sampler
) -> torch.Tensor:
    """Draws the token after each node.

    Args:
        output: of the verify pass; its next_token_logits [bs * n, V] are used up.
        sampling: of the bs requests. A request's own seed is combined with a node's position.
        tree: of the bs requests, n nodes each.
        sampler: the target's.

    Returns:
        int64 [bs, n], the same on all ranks of tensor parallelism.
    """
    bs, n = tree.tokens.shape
    logits = output.next_token_logits
    _adjust(logits, sampling, tree)
    at_a_time = bs if sampling.is_all_greedy else max(ROWS // n, 1)
    parts = []
    for first in range(0, bs, at_a_time):
        requests = slice(first, first + at_a_time)
        part = copy.copy(output)
        part.next_token_logits = logits.view(bs, n, -1)[requests].flatten(0, 1)
        rows = _per_node(sampling, requests, n)
        parts.append(sampler(part, rows, False, [], [], tree.positions[requests].flatten()))
    tokens = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.int64)
    if not sampling.is_all_greedy:
        _agree(tokens)
    return tokens.view(bs, n)


def _adjust(logits: torch.Tensor, sampling: SamplingBatchInfo, tree: DraftTree) -> None:
    """Custom logit processors and biases, the same for all nodes of a request, and penalties, by a node's path."""
    bs, n = tree.tokens.shape
    if sampling.has_custom_logit_processor:
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        apply_custom_logit_processor(logits, sampling, num_tokens_in_batch=n)
    by_node = logits.view(bs, n, -1)
    orchestrator = sampling.penalizer_orchestrator  # spec v2 hands out none
    if orchestrator is not None and orchestrator.is_required:
        penalties.apply(orchestrator, tree, by_node)
    if sampling.logit_bias is not None:
        by_node.add_(sampling.logit_bias[:, None])


def _per_node(sampling: SamplingBatchInfo, requests: slice, n: int) -> SamplingBatchInfo:
    """The parameters of some requests, one row a node; logits are adjusted already."""
    rows = copy.copy(sampling)
    rows.has_custom_logit_processor = False
    if sampling.is_all_greedy:
        return rows  # which the sampler then does not read
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        values = getattr(sampling, name)
        if values is not None:
            setattr(rows, name, values[requests].repeat_interleave(n, dim=0))
    return rows


def _agree(tokens: torch.Tensor) -> None:
    """Rank 0's draw counts: ranks draw from generators of their own."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        group.broadcast(tokens, src=0)
