# SPDX-License-Identifier: Apache-2.0
"""The buffers of a verify step and the metadata that points into them.

A captured graph keeps the addresses it was captured with, so `GraphBuffers` never grow and live as long as the metadata
that was made from them. `EagerBuffers` grow when a batch needs it and are otherwise reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import abi, ops  # noqa: F401 - ops defines mla_verify
from .packed import PackedVerify
from .paths import Target
from .plan import LATENT, Cut, mask_words, plan_size, workspace_floats

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

_mla_verify = torch.ops.treeverify.mla_verify.default

KV_LIMIT = 2**31
"""First number of KV slots that a batch's kv_indptr cannot hold."""


class HasPool(Protocol):
    """A ForwardBatch in some releases, an attention backend in others."""

    token_to_kv_pool: Any


@dataclass(frozen=True)
class Geometry:
    """What is the same for every verify step of a backend."""

    device: torch.device
    heads: int
    """Query heads of this rank."""
    row_width: int
    """Slots a row of req_to_token holds: the longest prefix with its draft fits."""
    target: Target
    path: int = abi.PATH_AUTO
    """What mla_verify is asked for, abi.PATH_*."""
    plan: bool = False
    """Whether mla_plan shares the splits out by length, every step."""
    index: torch.dtype = torch.int32
    """Of kv_indices: the backend's own width, so that its stock code can use the captured buffer too."""

    def cut(self, bs: int, n: int) -> Cut:
        """How each request's KV is split in a batch of `bs` requests, `n` tokens each, where there is no plan."""
        return self.target.cut(bs, n, self.heads)

    def planned(self, bs: int, n: int) -> int:
        """Splits that mla_plan shares out in such a batch; 0 where there is no plan, or nothing to choose."""
        return self.target.planned_splits(bs, n, self.heads) if self.plan else 0

    def workspace(self, bs: int, n: int) -> int:
        """fp32 elements that such a batch needs."""
        return workspace_floats(bs, n, self.heads, self.planned(bs, n) or bs * self.cut(bs, n).splits)


@dataclass(frozen=True, slots=True)
class VerifyMetadata:
    """Everything the layers of one step read. A backend's `forward_metadata` while treeverify serves its attention."""

    bs: int
    n: int
    cut: Cut
    """How each request's KV is split where there is no plan."""
    qo_indptr: torch.Tensor
    """int32 [>= bs + 1]: 0, n, 2n, ..."""
    kv_indptr: torch.Tensor
    """int32 [>= bs + 1]: prefix and draft of each request, nothing for padded ones."""
    kv_indices: torch.Tensor
    """int32 or int64, flat: slots of the KV pool."""
    mask: torch.Tensor | None
    """int64 [>= bs * n * ceil(n / 64)], flat: bit j of row i = node i sees node j. None: causal."""
    workspace: torch.Tensor
    """fp32, flat."""
    path: int = abi.PATH_AUTO
    """abi.PATH_*."""
    splits: int = 0
    """What mla_plan shares out, 0 without a plan."""
    split_indptr: torch.Tensor | None = None
    """int32 [>= plan_size(bs)]: the plan."""
    packed: PackedVerify | None = None
    """Calls mla_verify where the layers come here every step: not for graphs."""
    prefill_wrapper: None = None
    decode_wrapper: None = None
    """SGLang's forward_extend and forward_decode read these names first; there is no FlashInfer wrapper here."""

    def attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layer: RadixAttention,
        owner: HasPool,
        out: torch.Tensor | None = None,
        k_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attention of one layer, whose new KV is in the pool already.

        Args:
            q: [T, H, 512] with q_rope, else [T, H * 576] or [T, H, 576]; bf16 or fp16.
            q_rope: [T, H, 64] or None.
            owner: whose token_to_kv_pool holds the KV.
            out: [T, H * 512] to write to; allocated where None.
            k_scale: what the writer divided keys, and so values, by.

        Returns:
            [T, H * 512] in q's dtype; rows past bs * n are 0.
        """
        heads = layer.tp_q_head_num
        if q_rope is None:
            q = q.view(-1, heads, layer.head_dim)
            q, q_rope = q[..., :LATENT], q[..., LATENT:]
        out = q.new_empty(q.shape) if out is None else out.view(-1, heads, LATENT)
        args = (
            q,
            q_rope,
            owner.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.kv_indptr,
            self.kv_indices,
            self.qo_indptr,
            None,
            self.mask,
            None,
            abi.MASK_NONE if self.mask is None else abi.MASK_PACKED,
            self.bs,
            self.n,
            self.cut.splits,
            layer.scaling,
            layer.logit_cap,
            out,
            self.workspace,
            self.split_indptr,
            self.splits,
            self.path,
            0 if self.splits else self.cut.taper,
            k_scale,
        )
        if self.packed is not None and k_scale == 1.0 and q.is_cuda and not torch.compiler.is_compiling():
            self.packed(*args)
        else:
            _mla_verify(*args)
        return out.view(-1, heads * LATENT)


class GraphBuffers:
    """Buffers of every captured batch size up to `max_bs` at width `n`, allocated once before capture."""

    def __init__(self, geometry: Geometry, max_bs: int, n: int) -> None:
        self.geometry, self.max_bs, self.n = geometry, max_bs, n
        if max_bs * geometry.row_width >= KV_LIMIT:
            raise ValueError(
                f"treeverify: {max_bs} captured requests of {geometry.row_width} slots are more than {KV_LIMIT - 1}, "
                "what the int32 kv_indptr of SGLang and the kernels counts; lower --cuda-graph-max-bs or "
                "--context-length"
            )
        sizes = range(1, max_bs + 1)
        device = geometry.device
        self.qo_indptr = _steps(max_bs, n, device)
        self.kv_indptr = torch.zeros(max_bs + 1, dtype=torch.int32, device=device)
        self.split_indptr = torch.zeros(plan_size(max_bs), dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(max_bs * geometry.row_width, dtype=geometry.index, device=device)
        self.mask = torch.zeros(max_bs * n * mask_words(n), dtype=torch.int64, device=device)
        floats = max(geometry.workspace(bs, n) for bs in sizes)
        self.workspace = torch.empty(floats, dtype=torch.float32, device=device)

    def metadata(self, bs: int) -> VerifyMetadata:
        """Metadata of a captured batch of `bs` requests."""
        return _metadata(self.geometry, bs, self.n, self, self.qo_indptr)


class EagerBuffers:
    """Buffers for batches outside graphs; a larger batch replaces them, which needs no synchronisation."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        empty = torch.empty(0, dtype=torch.int32, device=geometry.device)
        self.kv_indptr = self.split_indptr = empty
        self.kv_indices = empty.to(geometry.index)
        self.mask, self.workspace = empty.long(), empty.float()
        self._qo_indptr: dict[int, torch.Tensor] = {}
        self._last: VerifyMetadata | None = None

    def metadata(self, bs: int, n: int, kv: int) -> VerifyMetadata:
        """Metadata of a batch of `bs` requests, `n` draft tokens each, with `kv` slots in all.

        The last one again, where it fits: then nothing is packed anew.

        Raises:
            RuntimeError: more slots than kv_indptr counts.
        """
        if kv >= KV_LIMIT:
            raise RuntimeError(
                f"treeverify: a verify batch of {bs} requests holds {kv} KV slots, more than {KV_LIMIT - 1}, what the "
                "int32 kv_indptr counts; lower --max-running-requests or --context-length"
            )
        last = self._last
        if last is not None and (last.bs, last.n) == (bs, n) and last.kv_indices.numel() >= kv:
            return last
        self.kv_indptr = grown(self.kv_indptr, bs + 1)
        self.split_indptr = grown(self.split_indptr, plan_size(bs))
        self.kv_indices = grown(self.kv_indices, kv)
        self.mask = grown(self.mask, bs * n * mask_words(n))
        self.workspace = grown(self.workspace, self.geometry.workspace(bs, n))
        if n not in self._qo_indptr or self._qo_indptr[n].numel() <= bs:
            self._qo_indptr[n] = _steps(bs, n, self.geometry.device)
        self._last = _metadata(self.geometry, bs, n, self, self._qo_indptr[n], PackedVerify())
        return self._last


def _metadata(
    geometry: Geometry,
    bs: int,
    n: int,
    buffers: GraphBuffers | EagerBuffers,
    qo_indptr: torch.Tensor,
    packed: PackedVerify | None = None,
) -> VerifyMetadata:
    planned = geometry.planned(bs, n)
    return VerifyMetadata(
        bs=bs,
        n=n,
        cut=geometry.cut(bs, n),
        qo_indptr=qo_indptr,
        kv_indptr=buffers.kv_indptr,
        kv_indices=buffers.kv_indices,
        mask=buffers.mask,
        workspace=buffers.workspace,
        path=geometry.path,
        splits=planned,
        split_indptr=buffers.split_indptr if planned else None,
        packed=packed,
    )


def _steps(bs: int, n: int, device: torch.device) -> torch.Tensor:
    """int32 [bs + 1]: 0, n, ..., bs * n."""
    return torch.arange(0, bs * n + 1, n, dtype=torch.int32, device=device)


def grown(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    """`buffer` where it holds `numel` elements, else a new one with half as much again."""
    return buffer if buffer.numel() >= numel else buffer.new_empty(numel + numel // 2)
