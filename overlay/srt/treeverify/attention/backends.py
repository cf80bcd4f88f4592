# SPDX-License-Identifier: Apache-2.0
"""SGLang's FlashInfer and Triton backends with TARGET_VERIFY on treeverify's kernels; all other modes are theirs.

One method of theirs prepares captures and replays, from a view of the padded batch that says how much of it is padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from .buffers import VerifyMetadata
from .triton_mla import attend
from .verifier import Verifier

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput

    _Backend = Any
else:
    _Backend = object


class _Verifying(_Backend):
    """The metadata of a verify step; goes before the backend among a class's bases."""

    index = torch.int32
    """Of the backend's own kv_indices."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.tree_verify = Verifier(model_runner, self.get_cuda_graph_seq_len_fill_value(), self.index)
        # EAGLE asks how a mask is to look, and for room to build it in. Room for no request: it makes a new one each
        # step, of the draft's columns alone, which no step before it still reads.
        self._form = VerifyMask(
            buffer=torch.empty(0, dtype=torch.bool, device=model_runner.device), mode=TreeMaskMode.QLEN_ONLY, max_bs=0
        )

    @property
    def verify_mask(self) -> VerifyMask:
        """The form that EAGLE builds a step's mask in."""
        return self._form

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Metadata of a batch outside graphs."""
        if forward_batch.forward_mode.is_target_verify():
            self.forward_metadata = self.tree_verify.eager(forward_batch)
        else:
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Metadata of a batch to capture, or (a view of the captured buffers) of one to replay."""
        view = forward_batch
        if not view.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(view, in_capture)
        elif in_capture:
            self.forward_metadata = self.tree_verify.capture(
                view.batch_size, view.positions.numel(), view.req_pool_indices, view.seq_lens
            )
        else:
            self.tree_verify.raw_bs = view.batch_size - view.num_padding
            self.forward_metadata = self.tree_verify.replay(
                view.batch_size, view.req_pool_indices, view.seq_lens, view.seq_lens_sum, view.spec_info
            )

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInput, cuda_graph_bs: int | None) -> None:
        """Prepares the step again: its mask was drafted after its metadata (overlap plan streams)."""
        self.tree_verify.refresh(spec_info)


class FlashInferMLAVerifyBackend(_Verifying, FlashInferMLAAttnBackend):
    """FlashInferMLAAttnBackend; plan() and the input's generate_attn_arg_prefill are never called for a verify step."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers of all graphs; FlashInfer's use treeverify's kv_indices."""
        indices = self.tree_verify.init_cuda_graph_state(max_bs, max_num_tokens)
        super().init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf=indices)

    def forward_extend(  # noqa: PLR0917 - SGLang's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; a verify step's `q`, `q_rope` as VerifyMetadata.attend has them."""
        if not isinstance(self.forward_metadata, VerifyMetadata):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope)
        if save_kv_cache and k is not None and k_rope is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        elif save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        if q_rope is not None:
            q = q.view(-1, layer.tp_q_head_num, layer.v_head_dim)
            q_rope = q_rope.view(-1, layer.tp_q_head_num, layer.head_dim - layer.v_head_dim)
        return self.forward_metadata.attend(q, q_rope, layer, self)


class TritonMLAVerifyBackend(_Verifying, TritonAttnBackend):
    """TritonAttnBackend of an MLA model; the buffers that its graphs need for batch x tree x context are not made."""

    index = torch.int64

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers of all graphs; Triton's have a row a request, for no decode step of a target drafts a tree."""
        indices = self.tree_verify.init_cuda_graph_state(max_bs, max_num_tokens)
        self.is_draft_runner = True  # it asks for nothing but whether to make the byte mask of a verify step
        super().init_cuda_graph_state(max_bs, max_bs, kv_indices_buf=indices)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer; a verify step's `q` as triton_mla.attend has it."""
        if not isinstance(self.forward_metadata, VerifyMetadata):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if save_kv_cache and k is not None:
            key = k if layer.k_scale is None else k.clone().div_(layer.k_scale)
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, key, v)
        out = forward_batch._attn_output
        if out is None:
            out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return attend(self.forward_metadata, q, layer, self, out)


MADE = {"flashinfer": FlashInferMLAVerifyBackend, "triton": TritonMLAVerifyBackend}
"""By the name of SGLang's backend, whose name they keep: the model's attention follows it."""
