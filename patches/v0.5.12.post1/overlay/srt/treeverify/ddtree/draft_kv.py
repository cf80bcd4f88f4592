# SPDX-License-Identifier: Apache-2.0
"""Brings the drafter's KV cache up to the committed tokens, from the target's hidden states at them.

The same kernels on the same rows as DFlashWorker._append_target_hidden_to_draft_kv, but that slots and positions come
from the commit, which knows them, and nothing waits for the device: up to MAX_ROWS rows are one CUDA graph each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .captured import Captured

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

MAX_ROWS = 64
"""Rows of the largest graph; more run uncaptured."""


class DraftKV:
    """The drafter's keys and values of committed tokens."""

    def __init__(self, model: Any, projection: Any, pool: KVCache) -> None:
        """Args:
        model: the drafter, SGLang's DFlashDraftModel.
        projection: SGLang's FusedKVMaterializeHelper of it.
        pool: its KV cache, whose slots are the target's; slot 0 is nobody's.
        """
        weight = model.fc.weight
        self._model, self._projection, self._pool = model, projection, pool
        self._features = torch.zeros(MAX_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self._places = torch.zeros(2, MAX_ROWS, dtype=torch.int64, device=weight.device)
        self._graphs = Captured(self._write_buffered)

    @classmethod
    def of(cls, worker: Any, context: int) -> DraftKV | None:
        """For a DFlashWorker; None where SGLang projects layer by layer, or keeps a window of the drafter's KV.

        Args:
            context: tokens a request may have. None too where the rotary embeddings' table is shorter: SGLang replaces
                it by a longer one when it must, which a graph would not see.
        """
        projection = worker._fused_kv_helper
        if projection is None or worker.use_compact_draft_cache:
            return None
        table = getattr(projection.rotary_emb, "cos_sin_cache", None)
        if table is None or table.shape[0] < context:
            return None
        return cls(worker.draft_model, projection, worker.draft_model_runner.token_to_kv_pool)

    def capture(self, rows: int) -> int:
        """Captures graphs of up to `rows` rows, which write into slot 0 meanwhile; returns their number."""
        return self._graphs.capture(range(min(rows, MAX_ROWS), 0, -1))

    def append(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes the KV of some tokens.

        Args:
            features: [rows, features], of the target at them.
            positions: int64 [rows], in their sequences.
            slots: int64 [rows], of the pool.
        """
        rows = features.shape[0]
        if rows not in self._graphs:
            self._write(features, positions, slots)
            return
        self._features[:rows].copy_(features)
        torch.stack((positions, slots), out=self._places[:, :rows])
        self._graphs(rows)

    def _write_buffered(self, rows: int) -> None:
        positions, slots = self._places[:, :rows]
        self._write(self._features[:rows], positions, slots)

    @torch.inference_mode()
    def _write(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        from sglang.srt.speculative.triton_ops.fused_kv_materialize import _fused_norm_rope

        told = self._projection
        hidden = self._model.project_target_hidden(features)
        every_layer = torch.einsum("th,loh->lto", hidden, told.batched_kv_weight)
        for i, layer in enumerate(self._model.layers):
            attn = layer.self_attn.attn
            k, v = _fused_norm_rope(
                every_layer[i], told.k_norm_weights[i], told.rotary_emb.cos_sin_cache, positions, told.num_kv_heads,
                told.head_dim, told.rotary_dim, told.eps_values[i],
            )  # fmt: skip
            self._pool.set_kv_buffer(attn, slots, k, v, attn.k_scale, attn.v_scale)
