# SPDX-License-Identifier: Apache-2.0
"""The ops of a verify step with their arguments packed once, for the calls of every step.

An op checks and packs all its arguments each time. Here what a bucket's steps have in common is checked and packed into
the kernel's parameters once, with the op's own checks; a call writes what a step may change, after a quick check of
that. What does not pass goes to the op's checks, which name the fault. On the CPU the ops answer: the reference.

By ctypes: a call through apache-tvm-ffi is 3 us cheaper still, one through a torch extension is not, and either would
tie the kernels' library to packages, versions and headers that it does not need now (docs/host-time.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import abi, ops
from .checks import INDEX_BYTES, check
from .launch import launch
from .plan import mask_words

if TYPE_CHECKING:
    from .buffers import VerifyMetadata


def prep(req_to_token: torch.Tensor, to: VerifyMetadata) -> Prep:
    """What prepares the steps of a bucket in the buffers of its metadata.

    Raises:
        ValueError: req_to_token or a buffer is none that the kernels could take.
    """
    return (PackedPrep if req_to_token.is_cuda else Prep)(req_to_token, to)


class Prep:
    """A bucket's steps by the ops, on any device."""

    def __init__(self, req_to_token: torch.Tensor, to: VerifyMetadata) -> None:
        self._table, self._bs, self._n = req_to_token, to.bs, to.n
        self._out = to.kv_indptr, to.kv_indices, to.mask
        plan = to.split_indptr
        self._plan = None if plan is None else ops.PlanArgs(to.kv_indptr, to.bs, to.splits, plan)

    def _args(self, *step: Any) -> ops.PrepArgs:
        return ops.PrepArgs._make((self._table, *step, self._bs, self._n, *self._out))

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        custom_mask: torch.Tensor | None,
        mask_kind: int,
        raw_bs: int,
    ) -> None:
        """Launches mla_prep, and mla_plan where the bucket is planned. Arguments as ops.PrepArgs.

        Raises:
            ValueError: an argument that the kernel could not take; the message says which.
        """
        ops.mla_prep(*self._args(req_pool_indices, seq_lens, custom_mask, mask_kind, raw_bs))
        if self._plan is not None:
            ops.mla_plan(*self._plan)


class PackedPrep(Prep):
    """A bucket's steps on CUDA: one struct for each kernel, kept."""

    def __init__(self, req_to_token: torch.Tensor, to: VerifyMetadata) -> None:
        super().__init__(req_to_token, to)
        device = req_to_token.device
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        self._params = ops.prep_params(self._args(nobody, nobody, None, abi.MASK_NONE, 0))
        self._plan_params = None if self._plan is None else ops.plan_params(self._plan)
        self._device, self._packed_words = device, self._n * mask_words(self._n)

    def __call__(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        custom_mask: torch.Tensor | None,
        mask_kind: int,
        raw_bs: int,
    ) -> None:
        if self._bs == 0:
            return
        if not self._takes(req_pool_indices, seq_lens, custom_mask, mask_kind, raw_bs):
            check(ops.prep_problems(self._args(req_pool_indices, seq_lens, custom_mask, mask_kind, raw_bs)))
        p = self._params
        p.req_pool_indices = req_pool_indices.data_ptr()
        p.seq_lens = seq_lens.data_ptr()
        p.seq_len_bytes = INDEX_BYTES[seq_lens.dtype]
        if custom_mask is None:
            p.custom_mask, p.mask_numel = None, 0
        else:
            p.custom_mask, p.mask_numel = custom_mask.data_ptr(), custom_mask.numel()
        p.mask_kind, p.raw_bs = mask_kind, raw_bs
        launch("mla_prep", p, self._device)
        if self._plan_params is not None:
            launch("mla_plan", self._plan_params, self._device)

    def _takes(
        self, rows: torch.Tensor, lens: torch.Tensor, mask: torch.Tensor | None, kind: int, raw_bs: int
    ) -> bool:
        """Whether ops.prep_problems would find nothing, asked quickly; False where it may find something."""
        return (
            0 <= raw_bs <= self._bs
            and rows.dtype is torch.int64
            and self._walkable(rows, raw_bs)
            and lens.dtype in INDEX_BYTES
            and self._walkable(lens, raw_bs)
            and (kind == abi.MASK_NONE if mask is None else self._is_mask(mask, kind, raw_bs))
        )

    def _is_mask(self, mask: torch.Tensor, kind: int, raw_bs: int) -> bool:
        packed = kind == abi.MASK_PACKED
        return (
            abi.MASK_PACKED <= kind <= abi.MASK_QLEN
            and mask.element_size() == (8 if packed else 1)
            and self._walkable(mask, raw_bs * self._packed_words if packed else 0)
        )

    def _walkable(self, t: torch.Tensor, entries: int) -> bool:
        return t.device == self._device and t.numel() >= entries and t.is_contiguous()


class PackedVerify:
    """mla_verify on CUDA with the buffers of one metadata: a struct for each layer and form of its tensors, kept.

    What tells two calls apart is compared, pointers into the step's own tensors are written. The metadata's buffers,
    bs, width, splits and path are those of the first call: another metadata needs another one of these.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], abi.VerifyParams] = {}

    def __call__(self, *args: Any) -> None:
        """Launches. Arguments as ops.VerifyArgs.

        Raises:
            ValueError: an argument that the kernel could not take; the message says which.
        """
        q, q_pe, kv, out = args[0], args[1], args[2], args[15]
        at, pe_at, out_at = q.data_ptr(), q_pe.data_ptr(), out.data_ptr()
        form = (
            (q.dtype, q.device, q.shape, q.stride(), q_pe.dtype, q_pe.shape, q_pe.stride()),
            (out.dtype, out.shape, out.stride(), (at | pe_at) % 16, out_at % 8),
            (kv.dtype, kv.data_ptr(), kv.shape, kv.stride(), args[13], args[14], args[21:]),
        )
        p = self._known.get(form)
        if p is None:
            p = self._known[form] = ops.verify_params(ops.VerifyArgs(*args))
        p.q_nope, p.q_pe, p.out = at, pe_at, out_at
        launch("mla_verify", p, q.device)
