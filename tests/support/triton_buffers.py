# SPDX-License-Identifier: Apache-2.0
"""The two-source layout: mla_verify on the buffers that SGLang's own TritonAttnBackend makes for a verify step.

The prefix comes by kv_indices, the draft rows by out_cache_loc, the mask is the step's own bytes. Nothing is converted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from mla_rig import LATENT, Step


@dataclass
class TwoSource:
    """Arguments of mla_verify, as Triton's lines leave them."""

    q: torch.Tensor
    """[T, H, 576]."""
    pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    qo_indptr: torch.Tensor
    out_cache_loc: torch.Tensor
    mask: torch.Tensor
    mask_indptr: torch.Tensor
    bs: int
    n: int
    scale: float
    mask_kind: int
    path: int = 0

    def forms(self) -> dict[str, str]:
        """dtypes of the backend's buffers."""
        names = ("kv_indptr", "kv_indices", "qo_indptr", "out_cache_loc", "mask", "mask_indptr")
        return {name: str(getattr(self, name).dtype).removeprefix("torch.") for name in names}

    def run(self, emulator: str | None = None) -> torch.Tensor:
        """[T, H * 512]: by the kernels on CUDA; on the CPU by the reference, or by a kernel on an emulated block.

        Args:
            emulator: library of kernels/emulator/one_split.cpp.
        """
        from sglang.srt.treeverify.attention import ops, paths, plan

        heads, device = self.q.shape[1], self.q.device
        cut = plan.Cut(1) if emulator else paths.target(device, self.path).cut(self.bs, self.n, heads)
        floats = plan.workspace_floats(self.bs, self.n, heads, self.bs * cut.splits)
        args = ops.VerifyArgs(
            self.q[..., :LATENT], self.q[..., LATENT:], self.pool, self.kv_indptr, self.kv_indices, self.qo_indptr,
            self.out_cache_loc, self.mask, self.mask_indptr, self.mask_kind, self.bs, self.n, cut.splits, self.scale,
            0.0, self.q.new_full((len(self.q), heads, LATENT), float("nan")), torch.empty(floats, device=device),
            path=self.path, taper=cut.taper,
        )  # fmt: skip
        if emulator is None:
            ops.mla_verify(*args)
        else:
            entry = ctypes.CDLL(emulator).tv_emulate_one_split
            entry.restype = ctypes.c_char_p
            error = entry(ctypes.byref(ops.verify_params(args)), ctypes.c_int64(self.pool.nbytes))
            assert error is None, error.decode()
        return args.out.flatten(1)


def two_source(step: Step, backend: Any, batch: Any, bucket: int | None = None) -> TwoSource:
    """A step as an eager pass of `backend` prepares it or, with `bucket` requests, a replay; its KV is in the pool."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.treeverify.attention import abi

    assert getattr(backend, "tree_verify", None) is None, "these are Triton's own lines"
    rig, n, bs, slots = step.rig, step.n, bucket or step.bs, step.out_cache_loc
    rig.pool.set_kv_buffer(rig.layer, slots, torch.cat([step.k, step.k_rope], -1), step.k)
    if bucket is None:
        backend.init_forward_metadata(batch)
        found = backend.forward_metadata
    else:
        backend.init_cuda_graph_state(bs, bs * n)
        runner = rig.graph_runner(backend, bs, n)
        rows, lens = runner.buffers.req_pool_indices[:bs], runner.buffers.seq_lens[:bs]
        verify, spec_info = ForwardMode.TARGET_VERIFY, runner.get_spec_info(bs * n)
        backend.init_forward_metadata_capture_cuda_graph(bs, bs * n, rows, lens, None, verify, spec_info)
        found = backend.forward_metadata
        runner.replay_prepare(batch)
        slots = runner.buffers.out_cache_loc
        step = step.padded((bs - step.bs) * n)
    q = torch.cat([step.q_nope, step.q_rope], -1)
    return TwoSource(
        q, rig.pool.get_key_buffer(0), found.kv_indptr, found.kv_indices, found.qo_indptr, slots, found.custom_mask,
        found.mask_indptr, bs, n, rig.layer.scaling, abi.MASK_FULL,
    )  # fmt: skip
