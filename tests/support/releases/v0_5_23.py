# SPDX-License-Identifier: Apache-2.0
"""SGLang v0.5.23: its settings stand in a runtime context, and a batch says by a plan where its KV is."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

SEQ_LENS = torch.int64
"""dtype of a graph runner's seq_lens."""

DRAFTS_BRANCHES = ["TritonMultiStepDraftBackend", "TritonAttnBackend"]
"""What drafts with topk > 1 for an MLA drafter on flashinfer: all steps, and one."""


class Settings:
    """What is in effect, read and changed under the names of the server's arguments."""

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.runtime_context import get_context

        return get_context().config_leaf(name)

    def __setattr__(self, name: str, value: Any) -> None:
        from sglang.srt.runtime_context import get_context

        get_context().override("tests", **{name: value})


@functools.cache
def _only_rank() -> None:
    """This process is a server's only rank."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0))


def server_args(values: dict[str, Any]) -> Settings:
    """Defaults and `values`, in effect in this process: what SGLang's own tests do, without a model."""
    from sglang.srt.runtime_context import get_context

    _only_rank()
    get_context().override_server_args(**values).install()
    return Settings()


class _Pageable:
    """torch where FlashInfer's backend makes its host buffers: pinned memory is refused without a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, **kwargs)


def complete(config: Any, runner: Any) -> None:
    """What this release wants beyond what every release does."""
    from sglang.srt.layers.attention import flashinfer_mla_backend
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.runtime_context import attention_backends, get_server_args, get_spec

    config.hf_config.get_text_config = lambda: config.hf_config
    config.hf_text_config, config.hf_config.architectures = config.hf_config, None
    config.linear_attn_registry_result = None
    config.head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    config.get_max_num_attention_heads = lambda: config.num_attention_heads
    config.get_num_kv_heads = lambda *ranks: config.num_attention_heads
    runner.server_args = get_server_args()  # as typed: nothing of what is in effect
    runner.prefill_attention_backend_str, runner.decode_attention_backend_str = attention_backends()
    runner.draft_attention_backend = runner.lora_manager = None
    runner.attn_tp_sequence_sharded = lambda tokens: False
    runner.decode_num_tokens_per_req = lambda: get_spec().speculative_num_draft_tokens
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token, token_to_kv_pool_allocator=None,
        token_to_kv_pool=runner.token_to_kv_pool, page_size=runner.page_size, device=runner.device,
        is_draft_worker=runner.is_draft_worker,
    )  # fmt: skip
    if runner.device == "cpu":
        flashinfer_mla_backend.torch = _Pageable()


def make_backend(runner: Any, name: str) -> Any:
    """The server's attention backend of that name, as ModelRunner has it made."""
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup as module

    return module._build_full_attention_backend_from_str(
        model_runner=runner, backend_str=name, init_new_workspace=False
    )


def step_backend(runner: Any, name: str, skip_prefill: bool) -> Any:
    """One that a drafter makes for its steps: FlashInferMLAAttnBackend or TritonAttnBackend."""
    if name == "triton":
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(runner, skip_prefill=skip_prefill)
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    return FlashInferMLAAttnBackend(runner, skip_prefill=skip_prefill)


def draft_factory(rig: Any, topk: int, steps: int) -> Any:
    """What EAGLE's worker asks for a drafter's attention backends."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    return DraftBackendFactory(rig.runner, topk, steps)


def tree_kernels() -> Any:
    """The module that chooses what builds EAGLE's trees."""
    from sglang.kernels.ops.speculative import spec_tree

    return spec_tree


def forward_batch(rig: Any, **fields: Any) -> Any:
    """A ForwardBatch, with the plan of where its KV is."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    batch = ForwardBatch(**fields)
    rig.runner.kv_index_translator.bind_own_plan(batch)
    return batch


def capture(backend: Any, bs: int, n: int, rows: torch.Tensor, lens: torch.Tensor, spec_info: Any = None) -> None:
    """What comes before a TARGET_VERIFY graph is captured."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    tokens = torch.zeros(bs * n, dtype=torch.int64, device=rows.device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=bs, input_ids=tokens, positions=tokens,
        req_pool_indices=rows, seq_lens=lens, out_cache_loc=tokens, seq_lens_sum=bs, spec_info=spec_info,
    )  # fmt: skip
    backend.kv_index_translator.bind_runner_slots(batch)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)


def replay(backend: Any, rows: torch.Tensor, lens: torch.Tensor, real: int, total: int | None, spec_info: Any) -> None:
    """What comes before its replay for `real` requests."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    bs = len(rows)
    tokens = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=real, input_ids=tokens, positions=tokens,
        req_pool_indices=rows[:real], seq_lens=lens[:real], out_cache_loc=tokens, spec_info=spec_info,
        seq_lens_sum=None if total is None else total - (bs - real),
    )  # fmt: skip
    backend.kv_index_translator.bind_own_plan(batch)
    buffers = SimpleNamespace(
        input_ids=tokens, positions=tokens, req_pool_indices=rows, seq_lens=lens, mamba_track_indices=None
    )
    view = build_replay_fb_view(batch, buffers, bs, real, 0, None, 1, ForwardMode.TARGET_VERIFY, False)
    backend.init_forward_metadata_out_graph(view)


def graph_runner(rig: Any, attn_backend: Any, bs: int, n: int) -> Any:
    """The real DecodeCudaGraphRunner with one bucket, as its __init__ leaves it just before it captures."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
    from sglang.srt.model_executor.runner_utils.deepep_adapter import DeepEPCudaGraphRunnerAdapter

    rig.runner.attn_backend, rig.runner.hisparse_coordinator = attn_backend, None
    runner = object.__new__(module.DecodeCudaGraphRunner)
    runner.__dict__.update(
        model_runner=rig.runner, attn_backend=attn_backend, device=rig.device, captured_req_width=n,
        capture_bs=[bs], max_bs=bs, max_num_token=bs * n, capture_hidden_mode=CaptureHiddenMode.FULL,
        capture_forward_mode=ForwardMode.TARGET_VERIFY, speculative_num_steps=3, speculative_num_draft_tokens=n,
        seq_len_fill_value=1, is_encoder_decoder=False, require_mlp_tp_gather=False, require_attn_tp_gather=False,
        require_gathered_buffer=False, enable_prefill_cp=False, enable_pdmux=False, enable_two_batch_overlap=False,
        ragged_verify_mode=False, deepep_adapter=DeepEPCudaGraphRunnerAdapter(), pp_size=1, num_dp_ranks=1,
        dllm_uses_input_embeds=False, _metadata_glue=None, attention_graph_variants=None, require_mlp_sync=False,
        record_nolora_graph=False,
    )  # fmt: skip
    runner.buffers = module.DecodeInputBuffers.create(
        device=rig.device, max_bs=bs, max_num_token=bs * n, hidden_size=8,
        next_token_logits_buffer=torch.zeros(bs * n, 8), dtype=rig.dtype, num_dp_ranks=1, pp_size=1,
        is_encoder_decoder=False, require_mlp_tp_gather=False, seq_len_fill_value=1, encoder_len_fill_value=0,
        num_tokens_per_req=n, cache_loc_dtype=torch.int64, enable_mamba_track=False,
    )  # fmt: skip
    runner.buffer_registry = build_decode_registry(
        device=rig.device, max_bs=bs, max_num_token=bs * n, seq_len_fill_value=1, cache_loc_dtype=torch.int64,
        share_pool=False, source=runner.buffers,
    )  # fmt: skip
    return runner


def runner_captures(runner: Any) -> None:
    """What a graph runner of one bucket does before it captures that."""
    batch, backend, _ = runner.capture_prepare(runner.max_bs)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)


def runner_replays(runner: Any, batch: Any) -> None:
    """What it does before it replays that for a batch."""
    runner.load_batch(batch)


def flashmla_is_served(rig: Any) -> bool:
    """Whether treeverify gives a runner something in FlashMLA's place."""
    from sglang.srt.treeverify.attention import choice

    return choice.verifying("flashmla", rig.runner) is not None


def mask_room(backend: Any) -> int:
    """Elements that a backend holds ready for masks written after its metadata."""
    return 0 if backend.verify_mask is None else backend.verify_mask.buffer.numel()
