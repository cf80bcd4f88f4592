# SPDX-License-Identifier: Apache-2.0
"""DDTREE's worker: DFLASH's, which drafts a tree where that one drafts a chain."""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_worker import DFlashWorker

from .. import ranks
from ..gates import TreeRefused, switched_on
from ..kv.pools import Mover, Unmovable
from ..kv.upkeep import DEFRAG, Upkeep
from .algorithm import NAME
from .budget.start import Adaptive, start
from .candidates import topk
from .draft_kv import DraftKV
from .draft_pass import DraftPass
from .drafting import MAX_BATCH, Drafting
from .head import TopKHead
from .layers import mover_of, refuse_layers
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
    from sglang.srt.speculative.dflash_info import DFlashDraftInput

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorker):
    """Drafts with DFlash, verifies trees (spec v1, any tp, pp 1).

    The drafter is given what DFLASH gives it, and its KV holds what it holds there; but the host waits for the device
    in the walk only (and where the drafter's attention backend does). Where the drafter keeps a window of its KV, or
    SGLang projects into it layer by layer, DFLASH's own steps are taken.
    """

    _adaptive: Adaptive | None = None
    """None: trees are always of the width that the server was given."""
    _draft_kv: DraftKV | None = None
    """None: DFLASH's own steps."""
    _mover: Mover | None = None
    """Of the target's KV, where pages are larger than a token."""
    _upkeep: Upkeep | None = None
    """Where the server is to defragment requests."""

    def __init__(self, server_args: ServerArgs, *, target_worker: TpModelWorker, **place: Any) -> None:
        target = target_worker.model_runner
        refuse_layers(target)
        self._mask_form = form_for(target.attn_backend)
        super().__init__(server_args=_drafter_args(server_args), target_worker=target_worker, **place)
        self.server_args = server_args
        self._width = int(server_args.speculative_num_draft_tokens)
        self._topk = get_tp_group().broadcast_object(topk(self._width - 1, target.model_config.vocab_size))
        self._head = TopKHead(self._topk)
        self._candidates: Candidates | None = None
        self._step: DDTreeVerifyInput | None = None
        self.tree_stats = Stats(self.device)
        ranks.check_installation()
        self._checks_ranks, self._steps = switched_on(ranks.CHECK), 0
        if self._mask_form is MaskForm.FULL:
            self._leave_room(target.model_config.context_len)
        self._adaptive = start(target, self._mask_form, self.block_size, self.tp_rank)
        self._embed = target.model.get_input_embeddings()
        self._drafting = Drafting(self._head, getattr(target.model, "lm_head", None), self.block_size - 1)
        self._draft_pass = DraftPass(
            self.draft_model_runner, self._draft_block_spec_info, self._mask_token_id, self.device
        )
        self._mover = mover_of(target) if self.page_size > 1 else None
        self._draft_kv = DraftKV.of(self, target.model_config.context_len)
        if self._draft_kv is None:
            logger.info(
                "treeverify: %s takes DFLASH's own steps between its passes: the drafter keeps a window of its KV, or "
                "its projection or rotary embeddings are not those that SGLang fuses.", NAME,
            )  # fmt: skip
        elif self.draft_model_runner.graph_runner is not None:
            self._capture(self._draft_kv, server_args.max_running_requests or MAX_BATCH)
        if switched_on(DEFRAG):
            self._upkeep = self._upkeep_of(target)

    def _capture(self, draft_kv: DraftKV, requests: int) -> None:
        """Captures what comes between the passes; tensor-parallel ranks talk while they draft, uncaptured."""
        begin = time.perf_counter()
        graphs = draft_kv.capture(requests * self.block_size)
        if get_tp_group().world_size == 1:
            widths = self._adaptive.budget.widths if self._adaptive else (self._width,)
            graphs += self._drafting.capture(requests, widths)
        if self.tp_rank == 0:
            logger.info(
                "treeverify: %s captured %d graphs of what comes between its passes, %.1f s.", NAME, graphs,
                time.perf_counter() - begin,
            )  # fmt: skip

    def _upkeep_of(self, target: ModelRunner) -> Upkeep | None:
        """None, with a line in the log, where slots cannot be moved."""
        if self._draft_kv is None:
            logger.warning("treeverify: %s has no effect: DFLASH's own steps are taken.", DEFRAG)
            return None
        try:
            mover = Mover(target.token_to_kv_pool, self.draft_model_runner.token_to_kv_pool)
        except Unmovable as e:
            logger.warning("%s. %s has no effect.", e, DEFRAG)
            return None
        return Upkeep(target.req_to_token_pool.req_to_token, target.token_to_kv_pool_allocator, mover)

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

    def _prepare_for_speculative_decoding(self, batch: ScheduleBatch, draft_input: DFlashDraftInput) -> None:
        """Drafts trees and makes them the batch's next pass."""
        if self._draft_kv is None or batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
            super()._prepare_for_speculative_decoding(batch, draft_input)
            return
        if draft_input.target_hidden.shape[0]:
            self._append_target_hidden_to_draft_kv(batch, draft_input)
        if self._upkeep is not None and (moved := self._upkeep(batch.reqs)) and self.tp_rank == 0:
            logger.info("treeverify: %d slots of a request were in %d runs, now in one.", moved.tokens, moved.pieces)
        hidden = self._draft_pass(batch, draft_input, self._embed)
        self.tree_stats.mark("draft")
        root = draft_input.bonus_tokens
        candidates, tree = self._drafting(hidden[:, 1:], root, batch.seq_lens, self._next_width())
        batch.spec_info = self._verify_input(candidates, tree, root, batch.seq_lens)
        batch.spec_info.prepare_for_verify(batch, self.page_size)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.return_hidden_states = False

    def _append_target_hidden_to_draft_kv(self, batch: ScheduleBatch, draft_input: DFlashDraftInput) -> None:
        """Brings the drafter's KV up to the committed tokens."""
        step, self._step = self._step, None
        if self._draft_kv is None or step is None or step.committed is None:
            super()._append_target_hidden_to_draft_kv(batch, draft_input)
            return
        self._draft_kv.append(draft_input.target_hidden, step.committed, batch.out_cache_loc)
        draft_input.draft_seq_lens = batch.seq_lens.to(torch.int32)
        draft_input.ctx_lens = torch.zeros_like(draft_input.ctx_lens)
        draft_input.target_hidden = draft_input.target_hidden[:0]

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, chunk_size: int = 256
    ) -> torch.Tensor:
        """DFLASH's choice, the likeliest token of each drafted position; the K likeliest are kept for the tree."""
        self.tree_stats.mark("draft")
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
        block = (-1, draft_token_num)
        root, first = draft_token.view(block)[:, 0].contiguous(), positions.view(block)[:, 0].contiguous()
        return self._verify_input(
            candidates, DraftTree.build(candidates, root, first, self._next_width()), root, first
        )

    def _next_width(self) -> int:
        return self._adaptive.budget.width if self._adaptive else self._width

    def _verify_input(
        self, candidates: Candidates, tree: DraftTree, root: torch.Tensor, prefix_lens: torch.Tensor
    ) -> DDTreeVerifyInput:
        """The pass over trees that were built of candidates below these roots."""
        adaptive, width = self._adaptive, tree.tokens.shape[1]
        promise = None
        if adaptive:
            adaptive.graphs.switch(width)
            if adaptive.budget.listens:
                narrow = width < self._width
                promise = (DraftTree.build(candidates, root, prefix_lens, self._width) if narrow else tree).scores
        self._steps += 1
        if self._checks_ranks:
            ranks.check_trees(tree, self._steps)
        self.tree_stats.mark("build")
        self._step = DDTreeVerifyInput(
            draft_token=tree.tokens.view(-1),
            positions=tree.positions.view(-1),
            draft_token_num=width,
            tree=tree,
            mask_form=self._mask_form,
            sampler=self.model_runner.sampler,
            stats=self.tree_stats,
            mover=self._mover,
            budget=adaptive.budget if adaptive else None,
            promise=promise,
        )
        return self._step


def _drafter_args(server_args: ServerArgs) -> ServerArgs:
    """Arguments under which DFLASH's worker and the draft runner see a block where the target sees a tree."""
    args = copy.copy(server_args)
    args.speculative_algorithm = "DFLASH"
    args.speculative_num_draft_tokens = args.speculative_dflash_block_size
    return args
