# SPDX-License-Identifier: Apache-2.0
"""What a DFlash drafter is given of each request: its bonus token, and mask tokens where others are to be drafted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

if TYPE_CHECKING:
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput


class Blocks:
    """Blocks of a batch. Launches, never waits."""

    def __init__(self, spec_info: DFlashVerifyInput, mask_token: int, device: Any) -> None:
        """Args:
        spec_info: tells the drafter's attention backend that blocks come.
        mask_token: stands where a token is to be drafted.
        """
        self._spec_info, self._mask_token = spec_info, mask_token
        self._offsets = torch.arange(spec_info.draft_token_num, dtype=torch.int64, device=device)
        self._ids = self._offsets.new_empty((0, spec_info.draft_token_num))

    @property
    def size(self) -> int:
        """B, tokens of a block."""
        return len(self._offsets)

    def __call__(self, bonus: torch.Tensor, prefix_lens: torch.Tensor, embed: Any) -> dict[str, Any]:
        """Fields of the ForwardBatch of a draft pass: all but slots, requests and lengths.

        Args:
            bonus: int64 [bs].
            prefix_lens: int64 [bs], tokens committed before them.
            embed: the target's input embedding.
        """
        ids = self._masked(len(bonus))
        ids[:, 0].copy_(bonus)
        return {
            "forward_mode": ForwardMode.TARGET_VERIFY, "batch_size": len(bonus), "input_ids": ids.view(-1),
            "input_embeds": embed(ids).flatten(0, 1), "positions": (prefix_lens[:, None] + self._offsets).view(-1),
            "spec_algorithm": SpeculativeAlgorithm.DFLASH, "spec_info": self._spec_info,
            "capture_hidden_mode": CaptureHiddenMode.NULL,
        }  # fmt: skip

    def _masked(self, bs: int) -> torch.Tensor:
        """int64 [bs, B]: mask tokens, but for the first of each."""
        if self._ids.shape[0] < bs:
            self._ids = self._ids.new_full((2 * bs, self.size), self._mask_token)
        return self._ids[:bs]
