# SPDX-License-Identifier: Apache-2.0
"""From the drafter's hidden states to trees: candidates of every position, then the trees, one CUDA graph a batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from .captured import Captured
from .head import check_vocab_parallel
from .tree import Candidates, DraftTree

if TYPE_CHECKING:
    from .head import TopKHead

MAX_BATCH = 16
"""Requests of the largest graph; more run uncaptured."""


class Drafting:
    """Drafts trees of B - 1 positions."""

    def __init__(self, head: TopKHead, lm_head: Any, positions: int) -> None:
        """Args:
        head: gives the candidates.
        lm_head: the target's, vocab-parallel.
        positions: B - 1.
        """
        check_vocab_parallel(lm_head)
        weight = lm_head.weight
        self._head, self._lm_head, self._weight = head, lm_head, weight.data_ptr()
        shape = (MAX_BATCH, positions, weight.shape[1])
        self._hidden = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._starts = torch.zeros(2, MAX_BATCH, dtype=torch.int64, device=weight.device)
        self._graphs = Captured(self._buffered)

    def capture(self, batch: int, widths: Iterable[int]) -> int:
        """Captures graphs of up to `batch` requests and of trees of these many nodes; returns their number."""
        return self._capture(product(range(min(batch, MAX_BATCH), 0, -1), widths))

    def _capture(self, keys: Iterable[tuple[int, int]]) -> int:
        self._weight = self._lm_head.weight.data_ptr()
        return self._graphs.capture(keys)

    def __call__(
        self, hidden: torch.Tensor, root: torch.Tensor, prefix_lens: torch.Tensor, n: int
    ) -> tuple[Candidates, DraftTree]:
        """What captured graphs return is overwritten by the next call.

        Args:
            hidden: [bs, B - 1, d], of the drafter.
            root: int64 [bs], the bonus tokens.
            prefix_lens: int64 [bs], tokens committed before the root.
            n: nodes a tree.
        """
        bs = hidden.shape[0]
        if (bs, n) not in self._graphs:
            return self._draft(hidden, root, prefix_lens, n)
        if self._lm_head.weight.data_ptr() != self._weight:  # the weights were replaced
            self._capture(self._graphs.keys)
        self._hidden[:bs].copy_(hidden)
        torch.stack((root, prefix_lens), out=self._starts[:, :bs])
        return self._graphs((bs, n))

    def _buffered(self, key: tuple[int, int]) -> tuple[Candidates, DraftTree]:
        bs, n = key
        root, prefix_lens = self._starts[:, :bs]
        return self._draft(self._hidden[:bs], root, prefix_lens, n)

    def _draft(
        self, hidden: torch.Tensor, root: torch.Tensor, prefix_lens: torch.Tensor, n: int
    ) -> tuple[Candidates, DraftTree]:
        ids, logprobs = self._head(hidden.flatten(0, 1), self._lm_head)
        shape = (*hidden.shape[:2], -1)
        candidates = Candidates(ids.view(shape), logprobs.view(shape))
        return candidates, DraftTree.build(candidates, root, prefix_lens, n)
