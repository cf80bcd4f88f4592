# SPDX-License-Identifier: Apache-2.0
"""The drafter's pass over a block of each request, in slots that the scheduler reserved behind its tokens.

What DFlashWorkerV2 does up to the drafter's hidden states, where the drafter's KV lies in the target's slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from .blocks import Blocks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


def bound(batch: ScheduleBatch, draft: DFlashDraftInputV2, tokens: int) -> torch.Tensor:
    """Lengths on the host, int64 or int32 [bs], that no request exceeds in a pass over `tokens` more of each.

    The scheduler may not have heard of the last step; what that committed is no more than a block.
    """
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu + tokens
    assert draft.reserved_seq_lens_cpu is not None, "the scheduler reserves slots before each step"
    return draft.reserved_seq_lens_cpu


class DraftPass:
    """Runs a DFlash drafter."""

    def __init__(self, runner: ModelRunner, spec_info: DFlashVerifyInput, mask_token: int, device: Any) -> None:
        """Args:
        runner: the drafter's.
        spec_info, mask_token: as for Blocks.
        """
        self._runner, self._blocks = runner, Blocks(spec_info, mask_token, device)

    def __call__(
        self, batch: ScheduleBatch, draft: DFlashDraftInputV2, slots: torch.Tensor, embed: Any
    ) -> torch.Tensor:
        """Drafts behind the bonus tokens.

        Args:
            draft: the batch's.
            slots: int64 [bs, >= B], behind each request's committed tokens.
            embed: the target's input embedding.

        Returns:
            Hidden states [bs, B, d], of the bonus token and the B - 1 drafted ones.
        """
        block, lens_cpu = self._blocks.size, bound(batch, draft, self._blocks.size)
        blocks = ForwardBatch(
            **self._blocks(draft.bonus_tokens, batch.seq_lens, embed), req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens, seq_lens_cpu=lens_cpu.to(torch.int32), seq_lens_sum=int(lens_cpu.sum()),
            out_cache_loc=slots[:, :block].flatten(),
        )  # fmt: skip
        with torch.inference_mode():
            hidden = self._runner.forward(blocks).logits_output.hidden_states
        return hidden.view(len(slots), block, -1)
