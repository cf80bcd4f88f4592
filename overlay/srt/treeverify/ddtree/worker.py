# SPDX-License-Identifier: Apache-2.0
"""DDTREE's worker: DFLASH's, which drafts a tree where that one drafts a chain."""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.dflash_worker import DFlashWorker

from .. import ranks
from ..gates import TreeRefused, switched_on
from .algorithm import NAME
from .budget.start import Adaptive, start
from .head import TopKHead
from .masks import MaskForm, form_for
from .stats import Stats
from .tree import Candidates, DraftTree
from .verify_input import DDTreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.managers.scheduler import GenerationBatchResult
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

TOPK = "TREEVERIFY_DDTREE_TOPK"
"""Candidates a position; the budget where unset. 1 drafts the chain that DFLASH drafts."""


class DDTreeWorker(DFlashWorker):
    """Drafts with DFlash, verifies trees (spec v1, any tp, pp 1).

    Everything before the tree (draft KV, draft pass) and after the accepted path (draft KV append) is DFLASH's.
    """

    _adaptive: Adaptive | None = None
    """None: trees are always of the width that the server was given."""

    def __init__(self, server_args: ServerArgs, *, target_worker: TpModelWorker, **place: Any) -> None:
        target = target_worker.model_runner
        _refuse(target)
        self._mask_form = form_for(target.attn_backend)
        super().__init__(server_args=_drafter_args(server_args), target_worker=target_worker, **place)
        self.server_args = server_args
        self._width = int(server_args.speculative_num_draft_tokens)
        self._topk = get_tp_group().broadcast_object(topk(self._width - 1, target.model_config.vocab_size))
        self._head = TopKHead(self._topk)
        self._candidates: Candidates | None = None
        self.tree_stats = Stats(self.device)
        ranks.check_installation()
        self._checks_ranks, self._steps = switched_on(ranks.CHECK), 0
        if self._mask_form is MaskForm.FULL:
            self._leave_room(target.model_config.context_len)
        self._adaptive = start(target, self._mask_form, self.block_size, self.tp_rank)

    def _leave_room(self, context: int) -> None:
        """Ends requests where a tree would not fit into the mask that Triton captures, `context` columns wide."""
        room = context - self._width
        if room <= 5:
            raise TreeRefused(
                f"treeverify: a context of {context} tokens has no room for trees of {self._width}; lower "
                "--speculative-num-draft-tokens"
            )
        if room < self.target_worker.max_req_len:
            logger.info("%s: requests end at %d tokens, a tree before the context length.", NAME, room)
            self.target_worker.max_req_len = room
            self.target_worker.max_req_input_len = room - 5

    def forward_batch_generation(
        self, batch: ScheduleBatch | ModelWorkerBatch, **kwargs: Any
    ) -> GenerationBatchResult:
        """One prefill, or one step: draft, verify, commit."""
        decodes = not (batch.forward_mode.is_extend() or getattr(batch, "is_extend_in_batch", False))
        if not decodes:
            if self._adaptive:
                self._adaptive.budget.pause()
            return super().forward_batch_generation(batch, **kwargs)
        if self._adaptive:
            self._adaptive.begin(batch)
        self.tree_stats.begin()
        result = super().forward_batch_generation(batch, **kwargs)
        self.tree_stats.end()
        return result

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, chunk_size: int = 256
    ) -> torch.Tensor:
        """DFLASH's choice, the likeliest token of each drafted position; the K likeliest are kept for the tree."""
        ids, logprobs = self._head(hidden_states, lm_head)
        shape = (-1, self.block_size - 1, self._topk)
        self._candidates = Candidates(ids.view(shape), logprobs.view(shape))
        return ids[:, 0]

    def make_verify_input(
        self, draft_token: torch.Tensor, positions: torch.Tensor, draft_token_num: int
    ) -> DDTreeVerifyInput:
        """What DFLASH would verify as a chain, as trees.

        Args:
            draft_token: int64 [bs * B]: bonus token and likeliest draft tokens of each request.
            positions: int64 [bs * B].
            draft_token_num: B.
        """
        candidates, self._candidates = self._candidates, None
        assert candidates is not None, "drafting comes first"
        self.tree_stats.mark("draft")
        block = (-1, draft_token_num)
        root, first = draft_token.view(block)[:, 0].contiguous(), positions.view(block)[:, 0].contiguous()
        adaptive = self._adaptive
        width = adaptive.budget.width if adaptive else self._width
        tree = DraftTree.build(candidates, root, first, width)
        promise = None
        if adaptive:
            adaptive.graphs.switch(width)
            looks_up = adaptive.budget.looks_up and width < self._width
            promise = (DraftTree.build(candidates, root, first, self._width) if looks_up else tree).scores
        self._steps += 1
        if self._checks_ranks:
            ranks.check_trees(tree, self._steps)
        self.tree_stats.mark("build")
        return DDTreeVerifyInput(
            draft_token=tree.tokens.view(-1),
            positions=tree.positions.view(-1),
            draft_token_num=width,
            tree=tree,
            mask_form=self._mask_form,
            sampler=self.model_runner.sampler,
            stats=self.tree_stats,
            budget=adaptive.budget if adaptive else None,
            promise=promise,
        )


def _refuse(target: ModelRunner) -> None:
    """Raises TreeRefused for layers that take rows for positions: siblings would be each other's past."""
    if target.mambaish_config is not None or hasattr(target.attn_backend, "update_mamba_state_after_mtp_verify"):
        layers = "recurrent layers (Mamba, linear attention), whose state follows one chain"
    elif target.sliding_window_size is not None:
        layers = "sliding-window layers, whose window counts rows and not positions"
    else:
        return
    raise TreeRefused(f"treeverify: {NAME} cannot serve a target with {layers}; pass --speculative-algorithm DFLASH")


def topk(budget: int, vocabulary: int) -> int:
    """Candidates a position: no more than the budget can matter (arXiv 2604.12989, lemma 1).

    Raises:
        ValueError: the environment asks for none.
    """
    wanted = os.environ.get(TOPK, "")
    if wanted and (not wanted.isdigit() or int(wanted) < 1):
        raise ValueError(f"treeverify: {TOPK} is {wanted!r}, expected a number of candidates from 1, or nothing")
    return min(int(wanted) if wanted else budget, budget, vocabulary)


def _drafter_args(server_args: ServerArgs) -> ServerArgs:
    """Arguments under which DFLASH's worker and the draft runner see a block where the target sees a tree."""
    args = copy.copy(server_args)
    args.speculative_algorithm = "DFLASH"
    args.speculative_num_draft_tokens = args.speculative_dflash_block_size
    return args
