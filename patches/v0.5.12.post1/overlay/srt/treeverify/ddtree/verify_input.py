# SPDX-License-Identifier: Apache-2.0
"""The verify step of a batch of draft trees: what the target is given, and what is kept of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..attention.reference import full_mask
from . import penalties
from .commit import Commit, accept
from .masks import MaskForm
from .sampling import predict
from .tree_input import TreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from ..kv.pools import Mover
    from .budget.controller import Budget
    from .stats import Stats
    from .tree import Path

logger = logging.getLogger(__name__)


@dataclass
class DDTreeVerifyInput(TreeVerifyInput):
    """Drafted trees, and what verify() needs beside them."""

    sampler: Sampler | None = None
    """The target's."""
    stats: Stats | None = None
    mover: Mover | None = None
    """Of the target's KV, where pages are larger than a token."""
    budget: Budget | None = None
    """Learns from the step, where widths are chosen and it listens."""
    promise: torch.Tensor | None = None
    """fp32 [bs, >= n]: scores of these trees or of larger ones, where the budget listens."""
    committed: torch.Tensor | None = None
    """int64 [sum of lengths]: positions of the tokens that verify() committed, which are in batch.out_cache_loc."""

    def prepare_for_verify(self, batch: ScheduleBatch, page_size: int, *, build_custom_mask: bool = True) -> None:
        """Allocates a slot for every node, maps them behind each request's prefix, and makes the mask."""
        super().prepare_for_verify(batch, page_size, build_custom_mask=False)
        if self.mask_form is MaskForm.FULL and not batch.forward_mode.is_idle():
            assert self.tree is not None
            self.custom_mask = full_mask(self.tree.visible(), batch.seq_lens_cpu.tolist())

    def verify(
        self, *, batch: ScheduleBatch, logits_output: LogitsProcessorOutput, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Draws the target's token after each node, walks the trees along them, and commits the paths.

        Returns:
            The bonus tokens, int64 [bs]; the committed tokens of each request, int32 [bs]; the target's hidden states
            at them in path order, [sum, features]; the accepted draft tokens of each request.
        """
        if batch.forward_mode.is_idle():
            empty = torch.empty(0, dtype=torch.int64, device=batch.device)
            return empty, empty.to(torch.int32), empty, []
        assert self.tree is not None and self.sampler is not None and self.stats is not None
        hidden = logits_output.hidden_states
        if hidden is None:
            raise RuntimeError("treeverify: the verify pass returned no hidden states, which the drafter reads")
        self.stats.mark("verify")
        n = self.draft_token_num
        predicted = predict(logits_output, batch.sampling_info, self.tree, self.sampler)
        paths, promise = self.tree.walk(predicted, self.promise)
        self.stats.mark("walk")
        if self.budget is not None and self.promise is not None:
            self.budget.observe(paths, promise)
        think_end = batch.model_config.think_end_id
        commits = [accept(req, path, think_end) for req, path in zip(batch.reqs, paths, strict=True)]
        prefix_lens_cpu = batch.seq_lens_cpu.tolist()
        kept = Commit.of(commits, n, batch.out_cache_loc.device, prefix_lens_cpu, page_size).apply(batch, self.mover)
        if batch.sampling_info.penalizer_orchestrator.is_required:
            tokens = kept.pad(self.tree.tokens.view(-1))
            penalties.commit(batch.sampling_info.penalizer_orchestrator, tokens, kept.lengths)
        self.committed = self.tree.positions.view(-1)[kept.rows]
        self.stats.count(paths)
        _report_nan(paths, batch)
        logits_output.hidden_states = None
        return kept.bonus, kept.lengths, hidden.view(-1, hidden.shape[-1]).index_select(0, kept.rows), [
            len(commit.nodes) - 1 for commit in commits
        ]


def _report_nan(paths: list[Path], batch: ScheduleBatch) -> None:
    broken = [req.rid for req, path in zip(batch.reqs, paths, strict=True) if path.size < 0]
    if broken:
        logger.error(
            "treeverify: the drafter's log-probabilities hold NaN for %s; nothing was drafted for them in this step. "
            "The output is the target's all the same.", ", ".join(broken),
        )  # fmt: skip
