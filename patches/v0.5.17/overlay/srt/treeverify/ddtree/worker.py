# SPDX-License-Identifier: Apache-2.0
"""DDTREE's worker: DFLASH's of spec v2, whose decode steps draft, verify and commit trees.

Nothing of a step waits for the device: the scheduler reserves slots for two trees ahead, prepares the next batch while
this one runs, and learns what was accepted from an asynchronous copy.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, GrammarTree, build_grammar_vocab_mask

from .. import ranks
from ..gates import TreeRefused, switched_on
from .algorithm import NAME
from .candidates import topk
from .draft_pass import DraftPass, bound
from .drafting import MAX_BATCH, Drafting
from .head import TopKHead
from .layers import mover_of, refuse_layers
from .masks import MaskForm, form_for
from .sampling import predict
from .slots import behind, moves
from .stats import Stats
from .tree_input import TreeVerifyInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    from .tree import DraftTree, Walked

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """Drafts with DFlash, verifies trees (spec v2, with overlap scheduling or without; any tp, pp 1).

    Prefills and idle batches are DFLASH's. The drafter sees blocks of B tokens where the target sees trees of n.
    """

    def __init__(self, server_args: ServerArgs, *, target_worker: TpModelWorker, **place: Any) -> None:
        refuse_layers(target_worker.model_runner)
        if SIMULATE_ACC_LEN > 0:
            raise ValueError(f"{NAME} accepts what the target takes: unset SGLANG_SIMULATE_ACC_LEN")
        self._width = int(server_args.speculative_num_draft_tokens)
        self._requests = server_args.max_running_requests or MAX_BATCH
        super().__init__(server_args=_drafter_args(server_args), target_worker=target_worker, **place)
        vocabulary = self.model_runner.model_config.vocab_size
        self._topk = get_tp_group().broadcast_object(topk(self._width - 1, vocabulary))
        self.tree_stats = Stats(self.device)
        ranks.check_installation()
        self._checks_ranks, self._steps = switched_on(ranks.CHECK), 0

    def init_attention_backends(self) -> None:
        """After the target's.

        Raises:
            TreeRefused: the target's backend or pool has no way for trees here.
        """
        super().init_attention_backends()
        if form_for(self.model_runner.attn_backend) is not MaskForm.PACKED:
            raise TreeRefused(
                f"treeverify: on this release {NAME} serves MLA targets on treeverify's kernels only; serve an MLA "
                "model without TREEVERIFY_TRITON=0 and TREEVERIFY_DISABLE=1, or pass --speculative-algorithm DFLASH"
            )
        self._mover = mover_of(self.model_runner)

    def init_cuda_graphs(self) -> None:
        """Captures the drafter's passes, and where it has graphs what comes behind them."""
        super().init_cuda_graphs()
        target = self.model_runner.model
        self._embed = target.get_input_embeddings()
        self._drafting = Drafting(TopKHead(self._topk), getattr(target, "lm_head", None), self.block_size - 1)
        self._draft_pass = DraftPass(
            self.draft_model_runner, self._draft_block_spec_info, self._mask_token_id, self.device
        )
        # Tensor-parallel ranks talk while they draft, uncaptured.
        if getattr(self.draft_model_runner, "decode_cuda_graph_runner", None) is None or get_tp_group().world_size > 1:
            return
        begin = time.perf_counter()
        graphs = self._drafting.capture(self._requests, (self._width,))
        logger.info(
            "treeverify: %s captured %d graphs of what comes between its passes, %.1f s.", NAME, graphs,
            time.perf_counter() - begin,
        )  # fmt: skip

    def _maybe_build_draft_sampler(self) -> None:
        """The drafter's graph ends with its hidden states: DFLASH's choice in it would be computed for nothing."""
        return

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        """One prefill, or one step: draft, verify, commit.

        Args:
            on_publish: takes the new sequence lengths, int64 [bs], as soon as they are on the device.
            grammar_barrier: brings the requests' grammars up to the last step.
        """
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        self.tree_stats.begin()
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())  # another stream's
        draft: DFlashDraftInputV2 = batch.spec_info
        slots = behind(
            self.model_runner.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens, self._width
        )
        tree = self._draft(batch, draft, slots)
        links = tree.next_token, tree.next_sibling, tree.tokens
        grammar = GrammarTree.from_device(*links) if batch.has_grammar else None
        prefix_lens, sampling = batch.seq_lens, batch.sampling_info
        target = self._verify(batch, draft, tree, slots)
        self.tree_stats.mark("verify")
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=grammar, sampling_info=sampling, device=slots.device, barrier=grammar_barrier
            )
            if mask is not None:
                mask.apply(target.logits_output.next_token_logits)
        walked = tree.walk_on_device(predict(target.logits_output, sampling, tree, self.model_runner.sampler))
        lengths = prefix_lens + walked.lengths
        if on_publish is not None:
            on_publish(lengths)
        self.tree_stats.mark("walk")
        self._commit(target.logits_output, walked, slots, prefix_lens)
        self.tree_stats.end(tree.sizes)
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=walked.tokens.flatten(),
            accept_lens=walked.lengths,
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=walked.bonus, new_seq_lens=lengths),
            speculative_num_draft_tokens=self.block_size,  # entries of a request in next_token_ids
            new_seq_lens=lengths,
        )

    def _draft(self, batch: ScheduleBatch, draft: DFlashDraftInputV2, slots: torch.Tensor) -> DraftTree:
        """Trees below the bonus tokens."""
        hidden = self._draft_pass(batch, draft, slots, self._embed)
        self.tree_stats.mark("draft")
        _, tree = self._drafting(hidden[:, 1:], draft.bonus_tokens, batch.seq_lens, self._width)
        self._steps += 1
        if self._checks_ranks:
            ranks.check_trees(tree, self._steps)
        self.tree_stats.mark("build")
        return tree

    def _verify(
        self, batch: ScheduleBatch, draft: DFlashDraftInputV2, tree: DraftTree, slots: torch.Tensor
    ) -> GenerationBatchResult:
        """The target's pass over the trees: logits [bs * n, V] and hidden states [bs * n, features]."""
        given = TreeVerifyInput(
            tree.tokens.view(-1), tree.positions.view(-1), self._width, tree=tree, mask_form=MaskForm.PACKED
        )
        batch.out_cache_loc = slots.view(-1)
        with _lengths(batch, bound(batch, draft, self._width)):
            forward_batch, _ = given.prepare_for_verify(batch, self.target_worker)
        self.tree_stats.mark("prep")
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _commit(
        self, output: LogitsProcessorOutput, walked: Walked, slots: torch.Tensor, prefix_lens: torch.Tensor
    ) -> None:
        """Target and drafter get the KV of accepted paths in the slots right behind the prefixes."""
        bs, block = walked.nodes.shape
        self._mover(*moves(slots, walked.nodes), group=block)
        hidden = output.hidden_states
        if hidden is None:
            raise RuntimeError("treeverify: the verify pass returned no hidden states, which the drafter reads")
        rows = walked.nodes.clamp(min=0) + self._width * torch.arange(bs, device=slots.device)[:, None]
        kept = slots[:, :block].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.index_select(0, rows.flatten()),
            cache_loc=kept.view(-1),
            positions=(prefix_lens[:, None] + self._block_pos_offsets).flatten(),
            cache_loc_2d=kept,
            commit_lens=walked.lengths,
        )
        output.hidden_states = None  # so that nobody copies them to the host


@contextmanager
def _lengths(batch: ScheduleBatch, lens_cpu: torch.Tensor) -> Iterator[None]:
    """The host's lengths, meanwhile."""
    known = batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens_cpu, batch.seq_lens_sum = lens_cpu, int(lens_cpu.sum())
    yield
    batch.seq_lens_cpu, batch.seq_lens_sum = known


def _drafter_args(server_args: ServerArgs) -> ServerArgs:
    """Arguments under which DFLASH's worker and the draft runner see a block where the target sees a tree."""
    args = copy.deepcopy(server_args)
    args.override("treeverify.drafter", speculative_num_draft_tokens=args.speculative_dflash_block_size)
    return args
