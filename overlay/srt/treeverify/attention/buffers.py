# SPDX-License-Identifier: Apache-2.0
"""The buffers of a verify step and the metadata that points into them.

A captured graph keeps the addresses it was captured with, so `GraphBuffers` never grow and live as long as the metadata
that was made from them. `EagerBuffers` grow when a batch needs it and are otherwise reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import abi, ops  # noqa: F401 - ops defines mla_verify
from .plan import LATENT, choose_nsplit, mask_words, workspace_floats

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_mla_verify = torch.ops.treeverify.mla_verify.default


@dataclass(frozen=True)
class Geometry:
    """What is the same for every verify step of a backend."""

    device: torch.device
    heads: int
    """Query heads of this rank."""
    row_width: int
    """Slots a row of req_to_token holds: the longest prefix with its draft fits."""
    sm_count: int
    """Multiprocessors of the GPU, 0 where unknown."""

    def nsplit(self, bs: int, n: int) -> int:
        """Splits of each request's KV in a batch of `bs` requests, `n` tokens each."""
        return choose_nsplit(bs, n, self.heads, self.sm_count)

    def workspace(self, bs: int, n: int) -> int:
        """fp32 elements that a batch of `bs` requests, `n` tokens each, needs."""
        return workspace_floats(bs * n, self.heads, self.nsplit(bs, n))


@dataclass(frozen=True, slots=True)
class VerifyMetadata:
    """Everything the layers of one verify step read. A backend's `forward_metadata` while it serves TARGET_VERIFY."""

    bs: int
    n: int
    nsplit: int
    qo_indptr: torch.Tensor
    """int32 [>= bs + 1]: 0, n, 2n, ..."""
    kv_indptr: torch.Tensor
    """int32 [>= bs + 1]: prefix and draft of each request, nothing for padded ones."""
    kv_indices: torch.Tensor
    """int32, flat: slots of the KV pool."""
    mask: torch.Tensor
    """int64 [>= bs * n * ceil(n / 64)], flat: bit j of row i = node i sees node j."""
    workspace: torch.Tensor
    """fp32, flat."""
    prefill_wrapper: None = None
    """SGLang's forward_extend reads this name before it saves the KV; there is no FlashInfer wrapper here."""

    def attend(
        self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Verify attention of one layer, whose draft KV is in the pool already.

        Args:
            q: [T, H, 512] with q_rope, else [T, H * 576] or [T, H, 576]; bf16 or fp16.
            q_rope: [T, H, 64] or None.

        Returns:
            [T, H * 512] in q's dtype; rows past bs * n are 0.
        """
        heads = layer.tp_q_head_num
        if q_rope is None:
            q = q.view(-1, heads, layer.head_dim)
            q, q_rope = q[..., :LATENT], q[..., LATENT:]
        out = q.new_empty(q.shape)
        _mla_verify(
            q,
            q_rope,
            forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.kv_indptr,
            self.kv_indices,
            self.qo_indptr,
            None,
            self.mask,
            None,
            abi.MASK_PACKED,
            self.bs,
            self.n,
            self.nsplit,
            layer.scaling,
            layer.logit_cap,
            out,
            self.workspace,
        )
        return out.view(-1, heads * LATENT)


class GraphBuffers:
    """Buffers of every captured batch size up to `max_bs` at width `n`, allocated once before capture."""

    def __init__(self, geometry: Geometry, max_bs: int, n: int) -> None:
        self.geometry, self.max_bs, self.n = geometry, max_bs, n
        if max_bs * geometry.row_width >= 2**31:
            raise ValueError(
                f"treeverify: {max_bs} captured requests of {geometry.row_width} slots overflow the int32 kv_indptr "
                "that SGLang and the kernels use; lower --cuda-graph-max-bs or --context-length"
            )
        sizes = range(1, max_bs + 1)
        device = geometry.device
        self.qo_indptr = _steps(max_bs, n, device)
        self.kv_indptr = torch.zeros(max_bs + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(max_bs * geometry.row_width, dtype=torch.int32, device=device)
        self.mask = torch.zeros(max_bs * n * mask_words(n), dtype=torch.int64, device=device)
        floats = max(geometry.workspace(bs, n) for bs in sizes)
        self.workspace = torch.empty(floats, dtype=torch.float32, device=device)

    def metadata(self, bs: int) -> VerifyMetadata:
        """Metadata of a captured batch of `bs` requests."""
        nsplit = self.geometry.nsplit(bs, self.n)
        return VerifyMetadata(
            bs, self.n, nsplit, self.qo_indptr, self.kv_indptr, self.kv_indices, self.mask, self.workspace
        )


class EagerBuffers:
    """Buffers for batches outside graphs; a larger batch replaces them, which needs no synchronisation."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        empty = torch.empty(0, dtype=torch.int32, device=geometry.device)
        self._kv_indptr = self._kv_indices = empty
        self._mask, self._workspace = empty.long(), empty.float()
        self._qo_indptr: dict[int, torch.Tensor] = {}

    def metadata(self, bs: int, n: int, kv: int) -> VerifyMetadata:
        """Metadata of a batch of `bs` requests, `n` draft tokens each, with `kv` slots in all."""
        self._kv_indptr = _grown(self._kv_indptr, bs + 1)
        self._kv_indices = _grown(self._kv_indices, kv)
        self._mask = _grown(self._mask, bs * n * mask_words(n))
        self._workspace = _grown(self._workspace, self.geometry.workspace(bs, n))
        if n not in self._qo_indptr or self._qo_indptr[n].numel() <= bs:
            self._qo_indptr[n] = _steps(bs, n, self.geometry.device)
        nsplit = self.geometry.nsplit(bs, n)
        return VerifyMetadata(
            bs, n, nsplit, self._qo_indptr[n], self._kv_indptr, self._kv_indices, self._mask, self._workspace
        )


def _steps(bs: int, n: int, device: torch.device) -> torch.Tensor:
    """int32 [bs + 1]: 0, n, ..., bs * n."""
    return torch.arange(0, bs * n + 1, n, dtype=torch.int32, device=device)


def _grown(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    """`buffer` where it holds `numel` elements, else a new one with half as much again."""
    return buffer if buffer.numel() >= numel else buffer.new_empty(numel + numel // 2)
