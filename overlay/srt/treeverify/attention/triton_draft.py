# SPDX-License-Identifier: Apache-2.0
"""Draft steps of an MLA drafter with topk > 1, on SGLang's Triton decode kernel.

FlashInfer's MLA draft backend takes one branch a step only. The model's attention follows the server's backend name,
here flashinfer, and so passes latent and rope parts apart; Triton's decode takes them joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, TritonMultiStepDraftBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class MLADraftStep(TritonAttnBackend):
    """TritonAttnBackend whose decode also takes q and k in two parts."""

    def forward_decode(  # noqa: PLR0917 - SGLang's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Decode attention of one draft step.

        Args:
            q: [T, H, 512] with q_rope [T, H, 64], else [T, H, 576].
            k: [T, 1, 512] with k_rope [T, 1, 64], else [T, 1, 576]; written to the pool.

        Returns:
            [T, H * 512] in q's dtype.
        """
        if q_rope is not None:
            latent = q.view(-1, layer.tp_q_head_num, layer.v_head_dim)
            rope = q_rope.view(-1, layer.tp_q_head_num, layer.head_dim - layer.v_head_dim)
            q = torch.cat([latent, rope], dim=-1)
        if k is not None and k_rope is not None:
            k = torch.cat([k.view(k.shape[0], 1, -1), k_rope.view(k.shape[0], 1, -1)], dim=-1)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


class MLATritonMultiStepDraftBackend(TritonMultiStepDraftBackend):
    """TritonMultiStepDraftBackend of such steps."""

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        super().__init__(model_runner, topk, speculative_num_steps)
        self.attn_backends = [
            MLADraftStep(model_runner, skip_prefill=True, kv_indptr_buf=self.kv_indptr[i])
            for i in range(speculative_num_steps - 1)
        ]
