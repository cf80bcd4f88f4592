# SPDX-License-Identifier: Apache-2.0
"""SGLang v0.5.17: model_executor/runner/, and metadata calls that take a batch or a view of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .arguments import server_args as server_args

SEQ_LENS = torch.int64
"""dtype of a graph runner's seq_lens."""

DRAFTS_BRANCHES = ["MLATritonMultiStepDraftBackend", "MLADraftStep"]
"""What drafts with topk > 1 for an MLA drafter on flashinfer: all steps, and one."""


def complete(config: Any, runner: Any) -> None:
    """What this release wants beyond what every release does."""
    config.hf_config.get_text_config = lambda: config.hf_config
    config.linear_attn_registry_result = None
    config.get_max_num_attention_heads = lambda: config.num_attention_heads


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

    return DraftBackendFactory(rig.args, rig.runner, topk, steps)


def tree_kernels() -> Any:
    """The module that chooses what builds EAGLE's trees."""
    from sglang.srt.speculative import eagle_utils

    return eagle_utils


def forward_batch(rig: Any, **fields: Any) -> Any:
    """A ForwardBatch; it has no pools in this release."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch(**fields)


def capture(backend: Any, bs: int, n: int, rows: torch.Tensor, lens: torch.Tensor, spec_info: Any = None) -> None:
    """What comes before a TARGET_VERIFY graph is captured."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    tokens = torch.zeros(bs * n, dtype=torch.int64, device=rows.device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=bs, input_ids=tokens, positions=tokens,
        req_pool_indices=rows, seq_lens=lens, out_cache_loc=tokens, seq_lens_sum=bs, spec_info=spec_info,
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(batch, in_capture=True)


def replay(backend: Any, rows: torch.Tensor, lens: torch.Tensor, real: int, total: int | None, spec_info: Any) -> None:
    """What comes before its replay for `real` requests."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    bs = len(rows)
    tokens = torch.zeros(0, dtype=torch.int64)
    cached = None if total is None else total - (bs - real)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, seq_lens_sum=cached, seq_lens_cpu=None, spec_info=spec_info
    )
    buffers = SimpleNamespace(
        input_ids=tokens, positions=tokens, req_pool_indices=rows, seq_lens=lens, mamba_track_indices=None
    )
    view = build_replay_fb_view(batch, buffers, bs, real, 0, 1, ForwardMode.TARGET_VERIFY, False)
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
        ragged_verify_mode=False, deepep_adapter=DeepEPCudaGraphRunnerAdapter(), pp_size=1, dp_size=1,
    )  # fmt: skip
    runner.buffers = module.DecodeInputBuffers.create(
        device=rig.device, max_bs=bs, max_num_token=bs * n, hidden_size=8,
        next_token_logits_buffer=torch.zeros(bs * n, 8), dtype=rig.dtype, dp_size=1, pp_size=1,
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


def complete_speculative(args: Any) -> None:
    """ServerArgs' own checks of its speculative arguments; on a CPU they refuse DFLASH by its device."""
    from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding

    args.device = "cuda"
    handle_speculative_decoding(args)


def model_runner(recurrent: bool, window: int | None) -> Any:
    """A runner as far as its layers tell."""
    from transformers import PretrainedConfig

    hf_config = PretrainedConfig()
    config = SimpleNamespace(hf_config=hf_config, linear_attn_registry_result=None)
    if recurrent:
        config.linear_attn_registry_result = (None, object())
    return SimpleNamespace(model_config=config, sliding_window_size=window)


def decode_reporter(draft_worker: Any, handler: Any) -> Any:
    """Calls the scheduler's real report of a decode step, whose log lines go to `handler`; four steps took nine."""
    import logging
    import time

    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter, logger
    from sglang.srt.server_args import get_global_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    pool = SimpleNamespace(get_decode_usage_msg_parts=lambda: ["#token: 1"], update_scheduler_stats=lambda _: None)
    batch = SimpleNamespace(reqs=[], forward_iter=1, batch_size=lambda: 2, dp_cooperation_info=None)
    scheduler = SimpleNamespace(
        server_args=get_global_server_args(), running_batch=batch, spec_algorithm=SpeculativeAlgorithm.DFLASH,
        draft_worker=draft_worker, pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: pool), waiting_queue=[],
        disaggregation_mode=None, forward_ct=1, kv_events_publisher=SimpleNamespace(publish_kv_events=lambda: None),
    )  # fmt: skip
    reporter = SimpleNamespace(
        scheduler=scheduler, spec_num_accept_tokens=9, spec_num_forward_ct=4, spec_num_block_accept_tokens=0,
        spec_num_cap_tokens=0, spec_total_num_accept_tokens=0, spec_total_num_forward_ct=0, fwd_occupancy=0.0,
        current_scheduler_metrics_enabled=False, is_stats_logging_rank=True, enable_mfu_metrics=False,
        forward_ct_decode=0, decode_log_interval=1, last_decode_stats_tic=time.perf_counter() - 1,
        num_generated_tokens=5, _graph_backend_label="cuda graph", _publish_kv_events=lambda: None,
    )  # fmt: skip
    return lambda: SchedulerMetricsReporter.report_decode_stats(reporter, True, batch)
