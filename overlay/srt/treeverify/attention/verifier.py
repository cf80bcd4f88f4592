# SPDX-License-Identifier: Apache-2.0
"""The verify steps of one attention backend, eager and captured: what the backends' patches call.

One fused launch prepares a step (`mla_prep`: where each request's KV lies, and the tree mask as bits; with
TREEVERIFY_PLAN=1 `mla_plan` shares the splits out by length), one op a layer attends (`VerifyMetadata.attend`).
Positions come with the verify input: no worker computes them in a launch that prep could save (docs/host-time.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import gates
from . import abi, paths
from .buffers import EagerBuffers, Geometry, GraphBuffers, VerifyMetadata
from .packed import Prep, prep

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class _Bucket(NamedTuple):
    """A batch size and width, and what prepares its steps."""

    metadata: VerifyMetadata
    prep: Prep


class _Mask(NamedTuple):
    """A step's mask and its form, abi.MASK_*."""

    tensor: torch.Tensor | None
    kind: int


_CAUSAL = _Mask(None, abi.MASK_NONE)


class _Step(NamedTuple):
    """Where a step's requests are; kept so that its mask can be read again."""

    bucket: _Bucket
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    cached: int | None
    """Prefix tokens of the real requests in all, as far as the host knows; None where it does not."""
    raw_bs: int


def geometry_of(model_runner: ModelRunner, plan: bool = False, index: torch.dtype = torch.int32) -> Geometry:
    """What the kernels are launched by on this runner's device and pool. Arguments as Geometry."""
    from ..compat import attention_ranks

    req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
    device, path = req_to_token.device, paths.chosen()
    return Geometry(
        device=device,
        heads=model_runner.model_config.num_attention_heads // attention_ranks(),
        row_width=req_to_token.shape[1],
        target=paths.target(device, path, model_runner.kv_cache_dtype),
        path=path,
        plan=plan,
        index=index,
    )


class Verifier:
    """Prepares the verify steps of one backend, eager and captured."""

    def __init__(self, model_runner: ModelRunner, fill: int, index: torch.dtype = torch.int32) -> None:
        """Verifier of a target runner's backend.

        Args:
            fill: prefix length that the graph runner gives padded rows.
            index: dtype of the backend's own kv_indices.
        """
        from ..compat import settings

        args = settings(model_runner)
        self._req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self._fill = fill
        self._trees = gates.drafts_trees(args)
        self._drop_mask = gates.switched_on(gates.DROP_MASK)
        self._geometry = geometry_of(model_runner, gates.plans(args), index)
        self._eager = EagerBuffers(self._geometry)
        self._graph: dict[int, GraphBuffers] = {}
        self._captured: dict[tuple[int, int], _Bucket] = {}
        self._last_eager: _Bucket | None = None
        self._width = 0
        self._step: _Step | None = None
        self.raw_bs: int | None = None
        """Requests of the next replay before padding, set by the graph runner; None where it has not said."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> torch.Tensor:
        """Allocates the buffers of the graphs to come, of width max_num_tokens / max_bs.

        Returns:
            kv_indices in the backend's own width, for stock code to use instead of allocating its own.
        """
        self._width = max_num_tokens // max_bs
        buffers = self._graph.get(self._width)
        if buffers is None or buffers.max_bs < max_bs:
            buffers = self._graph[self._width] = GraphBuffers(self._geometry, max_bs, self._width)
        return buffers.kv_indices

    def capture(
        self, bs: int, num_tokens: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
    ) -> VerifyMetadata:
        """Metadata for capturing a graph of `bs` requests; the mask is causal until the first replay."""
        n = num_tokens // bs
        bucket = self._captured[bs, n] = self._bucket(self._graph[n].metadata(bs))
        self._prepare(_Step(bucket, req_pool_indices, seq_lens, bs, bs), None)
        return bucket.metadata

    def replay(
        self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_sum: int | None, spec_info: Any
    ) -> VerifyMetadata:
        """Prepares the buffers of the captured graph for this step's requests and mask. Launches, never waits.

        Args:
            bs: requests of the captured graph; `raw_bs` of them are real.
            req_pool_indices: int64 [bs], stale where padded.
            seq_lens: int32 or int64 [bs], prefix lengths without the draft.
            seq_lens_sum: their sum as the host knows it, `fill` for each padded row; NGRAM's may lag behind. None where
                the host has no lengths.
            spec_info: this step's verify input.

        Returns:
            What the graph was captured with.
        """
        raw_bs, self.raw_bs = self.raw_bs, None
        if raw_bs is None:
            raise RuntimeError(
                "treeverify: nobody said how many requests of this replay are real (CudaGraphRunner.replay_prepare "
                "does): padded rows would be taken for requests. Is the graph runner's patch applied?"
            )
        bucket = self._captured[bs, getattr(spec_info, "draft_token_num", self._width)]
        cached = None if seq_lens_sum is None else seq_lens_sum - (bs - raw_bs) * self._fill
        self._prepare(_Step(bucket, req_pool_indices, seq_lens, cached, raw_bs), spec_info)
        return bucket.metadata

    def eager(self, forward_batch: ForwardBatch) -> VerifyMetadata:
        """Metadata of a step outside graphs. Lengths come from the host's copy: NGRAM leaves `seq_lens_sum` behind."""
        spec_info, bs, seq_lens_cpu = forward_batch.spec_info, forward_batch.batch_size, forward_batch.seq_lens_cpu
        unpadded = getattr(forward_batch, "_original_batch_size", None)
        raw_bs = bs if unpadded is None else unpadded
        n = spec_info.draft_token_num
        if seq_lens_cpu is not None:
            cached = int(seq_lens_cpu[:raw_bs].sum())
        elif forward_batch.seq_lens_sum is not None:
            cached = forward_batch.seq_lens_sum - (bs - raw_bs) * self._fill
        else:
            cached = None
        kv = raw_bs * self._geometry.row_width if cached is None else cached + raw_bs * n
        metadata = self._eager.metadata(raw_bs, n, kv)  # rows of padding are zeros, as rows past them
        if self._last_eager is None or self._last_eager.metadata is not metadata:
            self._last_eager = self._bucket(metadata)
        step = _Step(self._last_eager, forward_batch.req_pool_indices, forward_batch.seq_lens, cached, raw_bs)
        self._prepare(step, spec_info)
        return metadata

    def refresh(self, spec_info: Any) -> None:
        """Prepares the last step once more, for a mask that was written after its metadata (overlap plan streams)."""
        mask = getattr(spec_info, "custom_mask", None)
        idle = mask is not None and mask.numel() == 0
        if self._step is not None and not idle:
            self._prepare(self._step, spec_info)

    def _bucket(self, to: VerifyMetadata) -> _Bucket:
        return _Bucket(to, prep(self._req_to_token, to))

    def _prepare(self, step: _Step, spec_info: Any) -> None:
        self._step = step
        mask = self._mask(step, spec_info)
        step.bucket.prep(step.req_pool_indices, step.seq_lens, mask.tensor, mask.kind, step.raw_bs)
        stats = getattr(spec_info, "stats", None)
        if stats is not None:
            stats.mark("prep")

    def _mask(self, step: _Step, spec_info: Any) -> _Mask:
        """The step's own mask.

        Raises:
            RuntimeError: a tree's mask is too short for its batch.
        """
        if step.raw_bs == 0 or self._drop_mask:
            return _CAUSAL
        packed = getattr(spec_info, "packed_mask", None)
        if packed is not None:
            return _Mask(packed, abi.MASK_PACKED)
        mask = getattr(spec_info, "custom_mask", None)
        if mask is None:
            return _CAUSAL
        n = step.bucket.metadata.n
        numel, draft_only = mask.numel(), step.raw_bs * n**2
        if numel == draft_only:
            return _Mask(mask, abi.MASK_QLEN)
        expected = draft_only + n * (step.cached or 0)
        if self._trees and numel < expected:
            raise RuntimeError(
                f"treeverify: the tree mask of {step.raw_bs} requests, {n} tokens each, has {numel} "
                f"elements, expected {expected} (prefix and draft) or {draft_only} (draft only)"
            )
        return _Mask(mask, abi.MASK_FULL)
