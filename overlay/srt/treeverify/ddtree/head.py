# SPDX-License-Identifier: Apache-2.0
"""DDTree's drafting head: the k likeliest tokens of every drafted position, under the target's vocab-parallel LM head.

SGLang's DFlash worker takes the argmax of the same logits. Here each rank turns its shard's logits into lists
(head_ops), one all-gather brings those of all ranks together, and every rank merges them, with the same bits. Nothing
of vocabulary size is kept but the logits of one chunk of rows.

Logits are those of the bare matmul, as for DFlash's greedy choice: a target that scales or caps its logits would need
that here too.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from .head_abi import MAX_K
from .head_ops import list_count, topk_lists, topk_merge

CHUNK_ROWS = 256
"""Rows of a matmul, as in DFlashWorker._greedy_sample_from_vocab_parallel_head: same shapes, same logits."""


class Group(Protocol):
    """The part of SGLang's GroupCoordinator that is used."""

    world_size: int

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Concatenates the ranks' inputs along the first dimension."""


class TopKHead:
    """The k likeliest next tokens after each hidden state.

    Of equal logits the smaller id comes first, at the k-th place too. The first of the k is what DFlash's greedy choice
    gives, but where a token of a rank's added vocabulary ties with one of a later rank's base vocabulary: greedy takes
    the lower rank, this the smaller id, whatever the number of ranks.
    """

    def __init__(self, k: int, group: Group | None = None) -> None:
        """k: 1 .. 255, may exceed a rank's shard. group: the tensor-parallel one; SGLang's where None.

        Raises:
            ValueError: k is out of range.
        """
        if not 1 <= k <= MAX_K:
            raise ValueError(f"treeverify: {k} candidates a position are not within 1 .. {MAX_K}; ask for fewer")
        self._k = k
        self._group = group

    def __call__(self, hidden_states: torch.Tensor, lm_head: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks of the group must call it, with the same rows.

        Args:
            hidden_states: [rows, d] of the draft model, cast to the weight's dtype where it differs.
            lm_head: the target's, with `weight` [local vocabulary, padded, d] and `shard_indices` (SGLang's
                VocabParallelEmbeddingShardIndices; padded sizes are the same on all ranks).

        Returns:
            int64 ids [rows, k], likeliest first, and their fp32 log-probabilities [rows, k] under the softmax over the
            whole vocabulary, the same bits on every rank. Past the end of the vocabulary -1 and -inf. Log-probabilities
            hold NaN where there is no softmax: all do where a logit is NaN or all are -inf, that of a +inf logit does.

        Raises:
            RuntimeError: the head is not vocab-parallel.
        """
        check_vocab_parallel(lm_head)
        group = self._group or _tp_group()
        rows, ranks = hidden_states.shape[0], int(group.world_size)
        ids = torch.empty((rows, self._k), dtype=torch.int64, device=hidden_states.device)
        logprobs = torch.empty((rows, self._k), dtype=torch.float32, device=hidden_states.device)
        if rows == 0:
            return ids, logprobs
        lists = _local_lists(hidden_states, lm_head.weight, lm_head.shard_indices, self._k)
        if ranks > 1:
            gathered = lists.new_empty((ranks * rows, *lists.shape[1:]))
            group.all_gather_into_tensor(gathered, lists)
            lists = gathered
        topk_merge(lists.view(ranks, rows, *lists.shape[1:]), ids, logprobs)
        return ids, logprobs


def check_vocab_parallel(lm_head: Any) -> None:
    """Raises RuntimeError where an LM head is not one that TopKHead can read."""
    if not hasattr(lm_head, "weight") or not hasattr(lm_head, "shard_indices"):
        raise RuntimeError(
            "treeverify: DDTREE needs a vocab-parallel LM head with `weight` and `shard_indices`, which "
            f"{type(lm_head).__name__} is not; DFLASH needs the same, draft with another algorithm"
        )


class _Part(NamedTuple):
    """Tokens of a shard: of the base vocabulary, or of the added one (LoRA)."""

    row: int  # of the first in the shard's weight
    size: int
    padded: int
    first_id: int

    @property
    def lists(self) -> int:
        """As many on every rank: padded sizes are the same on all."""
        return list_count(self.padded)


def _parts(shard: Any) -> tuple[_Part, _Part]:
    base = int(shard.num_org_elements_padded)
    added = int(shard.num_added_elements_padded)
    return (
        _Part(0, int(shard.num_org_elements), base, int(shard.org_vocab_start_index)),
        _Part(base, int(shard.num_added_elements), added, int(shard.added_vocab_start_index)),
    )


def _local_lists(hidden_states: torch.Tensor, weight: torch.Tensor, shard: Any, k: int) -> torch.Tensor:
    """int64 [rows, lists, k + 1] of this rank's shard, those of the base vocabulary first."""
    rows, parts = hidden_states.shape[0], _parts(shard)
    shape = (rows, sum(part.lists for part in parts), k + 1)
    lists = torch.empty(shape, dtype=torch.int64, device=hidden_states.device)
    for chunk in range(0, rows, CHUNK_ROWS):
        hidden = hidden_states[chunk : chunk + CHUNK_ROWS].to(weight.dtype)
        mine = lists[chunk : chunk + CHUNK_ROWS].split([part.lists for part in parts], 1)
        for part, out in zip(parts, mine, strict=True):
            if part.size:
                topk_lists(torch.matmul(hidden, weight[part.row : part.row + part.size].T), part.first_id, out)
            else:
                out.zero_()
    return lists


def _tp_group() -> Group:
    from sglang.srt.distributed import get_tp_group

    group: Group = get_tp_group()
    return group
