# SPDX-License-Identifier: Apache-2.0
"""The target's own token after every node of a tree, drawn as SGLang draws a token where nothing is drafted.

A draft token is accepted where it is the token that the target drew (arXiv 2604.12989, section 4). No probability of
the drafter enters, so whatever the tree, the output has the target's law; greedy output is the target's argmax.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def predict(
    output: LogitsProcessorOutput, sampling: SamplingBatchInfo, positions: torch.Tensor, n: int, sampler: Sampler
) -> torch.Tensor:
    """Draws the token after each node.

    Args:
        output: of the verify pass; its next_token_logits [bs * n, V] are used up.
        sampling: of the bs requests.
        positions: int64 [bs * n], of the nodes: what a request's own seed is combined with.
        n: nodes a tree.
        sampler: the target's.

    Returns:
        int64 [bs, n], the same on all ranks of tensor parallelism.
    """
    _adjust(output.next_token_logits, sampling, n)
    rows = _per_node(sampling, n)
    tokens = sampler(output, rows, False, [], [], positions).to(torch.int64)
    if not sampling.is_all_greedy:
        _agree(tokens)
    return tokens.view(-1, n)


def _adjust(logits: torch.Tensor, sampling: SamplingBatchInfo, n: int) -> None:
    """Custom logit processors, penalties and biases, one for all nodes of a request, as DFLASH applies them."""
    if sampling.has_custom_logit_processor:
        from sglang.srt.layers.sampler import apply_custom_logit_processor

        apply_custom_logit_processor(logits, sampling, num_tokens_in_batch=n)
    if sampling.penalizer_orchestrator.is_required or sampling.logit_bias is not None:
        change = torch.zeros(len(sampling), logits.shape[1], dtype=torch.float32, device=logits.device)
        sampling.apply_logits_bias(change)
        logits.add_(change.repeat_interleave(n, dim=0))


def _per_node(sampling: SamplingBatchInfo, n: int) -> SamplingBatchInfo:
    """The same parameters, one row a node; logits are adjusted already."""
    rows = copy.copy(sampling)
    rows.has_custom_logit_processor = False
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        values = getattr(sampling, name)
        if values is not None:
            setattr(rows, name, values.repeat_interleave(n, dim=0))
    return rows


def _agree(tokens: torch.Tensor) -> None:
    """Rank 0's draw counts: ranks draw from generators of their own."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        group.broadcast(tokens, src=0)
