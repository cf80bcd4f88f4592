# SPDX-License-Identifier: Apache-2.0
"""The drafter's pass over a block of each request, without waiting for the device.

What DFlashWorker._prepare_for_speculative_decoding does up to the drafter's hidden states, where the drafter's KV lies
in the target's slots: its lengths are then the batch's, and the host knows those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.common import get_last_loc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

from .blocks import Blocks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput


class DraftPass:
    """Runs a DFlash drafter."""

    def __init__(self, runner: ModelRunner, spec_info: DFlashVerifyInput, mask_token: int, device: Any) -> None:
        """Args:
        runner: the drafter's.
        spec_info: tells its attention backend that blocks come.
        mask_token: stands where a token is to be drafted.
        """
        self._runner, self._blocks = runner, Blocks(spec_info, mask_token, device)

    def __call__(self, batch: ScheduleBatch, draft: DFlashDraftInput, embed: Any) -> torch.Tensor:
        """Drafts behind the bonus tokens.

        Args:
            draft: the batch's; draft_seq_lens int32 [bs] are the tokens committed, bonus_tokens [bs] come next.
            embed: the target's input embedding.

        Returns:
            Hidden states [bs, B, d], of the bonus token and the B - 1 drafted ones.

        Raises:
            RuntimeError: the pool has no room for the block, which is given back at once.
        """
        bs, block = batch.batch_size(), self._blocks.size
        given = self._blocks(draft.bonus_tokens, batch.seq_lens, embed)
        lens, lens_cpu = draft.draft_seq_lens, batch.seq_lens_cpu.to(torch.int32)
        allocator = self._runner.token_to_kv_pool_allocator
        before = allocator.backup_state()
        try:
            rows, table = batch.req_pool_indices, self._runner.req_to_token_pool.req_to_token
            if allocator.page_size == 1:
                slots = allocator.alloc(bs * block)
            else:
                slots = allocator.alloc_extend(
                    lens, lens_cpu, lens + block, lens_cpu + block, get_last_loc(table, rows, lens), bs * block
                )
            if slots is None:
                raise RuntimeError(
                    f"treeverify: no {bs * block} free slots for the drafter's block; lower --max-running-requests or "
                    "raise --mem-fraction-static"
                )
            assign_req_to_token_pool_func(rows, table, lens, lens + block, slots, bs)
            blocks = ForwardBatch(
                **given, req_pool_indices=rows, seq_lens=lens, seq_lens_cpu=lens_cpu, seq_lens_sum=int(lens_cpu.sum()),
                out_cache_loc=slots, req_to_token_pool=self._runner.req_to_token_pool,
                token_to_kv_pool=self._runner.token_to_kv_pool, attn_backend=self._runner.attn_backend,
            )  # fmt: skip
            with torch.inference_mode():
                hidden = self._runner.forward(blocks).logits_output.hidden_states
        finally:
            allocator.restore_state(before)
        return hidden.view(bs, block, -1)
