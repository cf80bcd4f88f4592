# SPDX-License-Identifier: Apache-2.0
"""fp8 KV under SGLang's FlashInferMLAAttnBackend, outside of TARGET_VERIFY.

FlashInfer's MLA kernels read no fp8, so stock code casts the whole pool to the queries' dtype, in every layer of every
pass. Here a decode step is a verify step of one token, whose kernel reads the pool as it is. A prefill behind a cached
prefix stays FlashInfer's: the rows it attends to are gathered, those alone are cast, and the wrapper is planned on
their places in that copy; more than half of the pool stays stock code's cast of all of it. The backend's writer stores
keys as they are, so there is no scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import gates
from . import abi, ops  # noqa: F401 - ops defines mla_prep
from .buffers import VerifyMetadata, grown
from .verifier import geometry_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_mla_prep = torch.ops.treeverify.mla_prep.default


def attach(backend: FlashInferMLAAttnBackend, model_runner: ModelRunner, skip_prefill: bool) -> Fp8Pool | None:
    """The reader of a backend that has its buffers; None where stock code keeps the pool."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    if skip_prefill or type(backend) is not FlashInferMLAAttnBackend:
        return None
    if not gates.reads_fp8(model_runner, torch.device(model_runner.device)):
        return None
    return Fp8Pool(model_runner, backend)


class Fp8Pool:
    """Decode steps of one backend, eager and captured, and the rows of its prefills."""

    def __init__(self, model_runner: ModelRunner, backend: FlashInferMLAAttnBackend) -> None:
        self._geometry = geometry_of(model_runner)
        self._req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self._kv_indptr, self._qo_indptr = backend.kv_indptr, backend.q_indptr_decode
        ints = torch.empty(0, dtype=torch.int32, device=self._geometry.device)
        self._kv_indices = self._places = ints
        self._slots: int = model_runner.token_to_kv_pool.size
        self._rows: torch.Tensor | None = None
        self._no_mask, self._workspace = ints.long(), ints.float()
        self._graph_workspaces = [self._workspace]
        self._captured: dict[int, VerifyMetadata] = {}

    def eager(self, forward_batch: ForwardBatch) -> VerifyMetadata:
        """Metadata of a decode step outside graphs; `seq_lens` counts the new tokens already."""
        bs, on_host = len(forward_batch.req_pool_indices), forward_batch.seq_lens_cpu
        total = max(forward_batch.seq_lens_sum, 0 if on_host is None else int(on_host[:bs].sum()))
        self._kv_indices = grown(self._kv_indices, total)
        self._workspace = grown(self._workspace, self._geometry.workspace(bs, 1))
        metadata = self._metadata(bs, self._kv_indices, self._workspace)
        self._prepare(metadata, forward_batch.req_pool_indices, forward_batch.seq_lens)
        return metadata

    def capture(
        self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, kv_indices: torch.Tensor
    ) -> VerifyMetadata:
        """Metadata for capturing a decode graph of `bs` requests; `kv_indices` is the backend's buffer for graphs."""
        floats = self._geometry.workspace(bs, 1)
        if self._graph_workspaces[-1].numel() < floats:  # earlier graphs keep theirs
            self._graph_workspaces.append(self._workspace.new_empty(floats))
        metadata = self._captured[bs] = self._metadata(bs, kv_indices, self._graph_workspaces[-1])
        self._prepare(metadata, req_pool_indices, seq_lens)
        return metadata

    def replay(self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Prepares the buffers of the captured graph. Padded requests have one token, of whatever request."""
        self._prepare(self._captured[bs], req_pool_indices, seq_lens)

    def gather(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Makes `kv_indices` the rows of the next prefill; returns where they will be: int32, 0, 1, 2, ...

        A slot is there once for each request that has it: behind prefixes that requests share the rows may be more than
        the pool. Past half of it the whole pool is cast, as stock code does: less memory then, and less traffic.
        """
        if 2 * kv_indices.numel() > self._slots:
            self._rows = None
            return kv_indices
        self._rows = kv_indices.clamp(0, self._slots)  # what lies past the last request is not initialised
        if self._places.numel() < kv_indices.numel():
            size = kv_indices.numel() + kv_indices.numel() // 2
            self._places = torch.arange(size, dtype=torch.int32, device=kv_indices.device)
        return self._places[: kv_indices.numel()]

    def gathered(self, buffer: torch.Tensor) -> torch.Tensor:
        """Those rows of a layer's pool [slots, 1, 576], or all of it; still fp8."""
        if self._rows is None:
            return buffer
        return buffer.view(torch.uint8).index_select(0, self._rows).view(buffer.dtype)

    def _metadata(self, bs: int, kv_indices: torch.Tensor, workspace: torch.Tensor) -> VerifyMetadata:
        return VerifyMetadata(
            bs=bs,
            n=1,
            cut=self._geometry.cut(bs, 1),
            qo_indptr=self._qo_indptr,
            kv_indptr=self._kv_indptr,
            kv_indices=kv_indices,
            mask=None,
            workspace=workspace,
            path=self._geometry.path,
        )

    def _prepare(self, to: VerifyMetadata, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        where = self._req_to_token, req_pool_indices, seq_lens
        _mla_prep(*where, None, abi.MASK_NONE, to.bs, to.bs, 0, to.kv_indptr, to.kv_indices, self._no_mask)


def places(backend: Any, wrapper: Any, kv_indices: torch.Tensor) -> torch.Tensor:
    """What `wrapper` is planned on for a pass that attends to `kv_indices`: those, or their places once gathered."""
    pool = getattr(backend, "fp8_pool", None)
    return kv_indices if pool is None or wrapper is not backend.prefill_wrapper_paged else pool.gather(kv_indices)


def keys(backend: Any, wrapper: Any, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
    """The rows [.., 1, 576] that `wrapper` was planned on: of the pool, or gathered out of it."""
    buffer = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id)
    pool = getattr(backend, "fp8_pool", None)
    return buffer if pool is None or wrapper is not backend.prefill_wrapper_paged else pool.gathered(buffer)
