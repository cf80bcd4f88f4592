# SPDX-License-Identifier: Apache-2.0
"""What the target is given of a batch of draft trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from .masks import MaskForm

if TYPE_CHECKING:
    import torch

    from .tree import DraftTree


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """DFLASH's verify input with trees in place of chains."""

    tree: DraftTree | None = None
    mask_form: MaskForm = MaskForm.FULL

    @property
    def packed_mask(self) -> torch.Tensor | None:
        """int64 [bs, n, ceil(n / 64)] where treeverify's kernels verify, else None (custom_mask holds it)."""
        assert self.tree is not None
        return self.tree.mask if self.mask_form is MaskForm.PACKED else None
