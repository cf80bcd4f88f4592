# SPDX-License-Identifier: Apache-2.0
"""SGLang v0.5.12.post1: cuda_graph_runner.py, and metadata calls that take each tensor by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .arguments import server_args as server_args

SEQ_LENS = torch.int32
"""dtype of a graph runner's seq_lens."""

DRAFTS_BRANCHES = ["MLATritonMultiStepDraftBackend", "MLADraftStep"]
"""What drafts with topk > 1 for an MLA drafter on flashinfer: all steps, and one."""


def complete(config: Any, runner: Any) -> None:
    """Nothing that this release wants beyond what every release does."""


def make_backend(runner: Any, name: str) -> Any:
    """The server's attention backend: FlashInferMLAAttnBackend or TritonAttnBackend."""
    return step_backend(runner, name, skip_prefill=False)


def step_backend(runner: Any, name: str, skip_prefill: bool) -> Any:
    """The same, as a drafter makes it for its steps."""
    if name == "triton":
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(runner, skip_prefill=skip_prefill)
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    return FlashInferMLAAttnBackend(runner, skip_prefill=skip_prefill)


def draft_factory(rig: Any, topk: int, steps: int) -> Any:
    """What EAGLE's worker asks for a drafter's attention backends."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    return DraftBackendFactory(rig.args, rig.runner, topk, steps)


def forward_batch(rig: Any, **fields: Any) -> Any:
    """A ForwardBatch over the rig's pools."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch(req_to_token_pool=rig.requests, token_to_kv_pool=rig.pool, **fields)


def capture(backend: Any, bs: int, n: int, rows: torch.Tensor, lens: torch.Tensor, spec_info: Any = None) -> None:
    """What comes before a TARGET_VERIFY graph is captured."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    verify = ForwardMode.TARGET_VERIFY
    backend.init_forward_metadata_capture_cuda_graph(bs, bs * n, rows, lens, None, verify, spec_info)


def replay(backend: Any, rows: torch.Tensor, lens: torch.Tensor, real: int | None, total: int, spec_info: Any) -> None:
    """What comes before its replay for `real` requests (None: nobody says how many)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.treeverify.attention import graph

    if real is not None:
        graph.hand_over_raw_bs(backend, real)
    backend.init_forward_metadata_replay_cuda_graph(
        len(rows), rows, lens, total, None, ForwardMode.TARGET_VERIFY, spec_info, seq_lens_cpu=lens.cpu()
    )


def graph_runner(rig: Any, attn_backend: Any, bs: int, n: int) -> Any:
    """The real CudaGraphRunner with one bucket, as its __init__ leaves it just before it captures."""
    from sglang.srt.model_executor import cuda_graph_runner as module
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    rig.runner.attn_backend = attn_backend
    runner = object.__new__(module.CudaGraphRunner)
    runner.__dict__.update(
        model_runner=rig.runner, attn_backend=attn_backend, device=rig.device, num_tokens_per_bs=n,
        capture_bs=[bs], max_bs=bs, max_num_token=bs * n, capture_hidden_mode=CaptureHiddenMode.FULL,
        capture_forward_mode=ForwardMode.TARGET_VERIFY, speculative_num_steps=3, speculative_num_draft_tokens=n,
        seq_len_fill_value=1, is_encoder_decoder=False, require_mlp_tp_gather=False, require_gathered_buffer=False,
        nsa_enable_prefill_cp=False, enable_pdmux=False, enable_two_batch_overlap=False,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "device": rig.device, "max_bs": bs, "max_num_token": bs * n, "hidden_size": 8, "vocab_size": 8,
        "dtype": rig.dtype, "dp_size": 1, "pp_size": 1, "is_encoder_decoder": False,
        "require_mlp_tp_gather": False, "seq_len_fill_value": 1, "encoder_len_fill_value": 0,
        "num_tokens_per_bs": n, "cache_loc_dtype": torch.int64, "enable_mamba_track": False,
    }  # fmt: skip
    if hasattr(module, "treeverify"):
        arguments["custom_mask_numel"] = module.treeverify.capture_mask_numel(attn_backend)
    runner.buffers = module.DecodeInputBuffers.create(**arguments)
    return runner


def runner_captures(runner: Any) -> None:
    """What a graph runner of one bucket does before it captures that."""
    bs, n, buffers = runner.max_bs, runner.num_tokens_per_bs, runner.buffers
    rows, lens = buffers.req_pool_indices[:bs], buffers.seq_lens[:bs]
    capture(runner.attn_backend, bs, n, rows, lens, runner.get_spec_info(bs * n))


def runner_replays(runner: Any, batch: Any) -> None:
    """What it does before it replays that for a batch."""
    runner.replay_prepare(batch)


def flashmla_is_served(rig: Any) -> bool:
    """Whether treeverify serves a backend that derives from FlashInfer's under FlashMLA's name."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    backend = type("FlashMLABackend", (FlashInferMLAAttnBackend,), {})(rig.runner)
    return backend.tree_verify is not None


def mask_room(backend: Any) -> int:
    """Elements that a backend holds ready for masks and positions written after its metadata."""
    return sum(0 if part is None else part.numel() for part in backend.get_verify_buffers_to_fill_after_draft())


def complete_speculative(args: Any) -> None:
    """ServerArgs' own checks of its speculative arguments."""
    args._handle_speculative_decoding()


def model_runner(recurrent: bool, window: int | None) -> Any:
    """A runner as far as its layers tell."""
    return SimpleNamespace(
        mambaish_config=object() if recurrent else None, sliding_window_size=window, attn_backend=object()
    )


def decode_reporter(draft_worker: Any, handler: Any) -> Any:
    """Calls the scheduler's real report of a decode step, whose log lines go to `handler`; four steps took nine."""
    import logging
    import time

    from sglang.srt.observability.scheduler_metrics_mixin import SchedulerMetricsMixin, logger
    from sglang.srt.server_args import get_global_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    pool = SimpleNamespace(get_decode_usage_msg_parts=lambda: ["#token: 1"], update_scheduler_stats=lambda _: None)
    batch = SimpleNamespace(reqs=[], forward_iter=1, batch_size=lambda: 2, dp_cooperation_info=None)
    scheduler = SimpleNamespace(
        server_args=get_global_server_args(), running_batch=batch, spec_algorithm=SpeculativeAlgorithm.DFLASH,
        draft_worker=draft_worker, spec_num_accept_tokens=9, spec_num_forward_ct=4, spec_total_num_accept_tokens=0,
        spec_total_num_forward_ct=0, current_scheduler_metrics_enabled=False, is_stats_logging_rank=True,
        enable_mfu_metrics=False, forward_ct_decode=0, last_decode_stats_tic=time.perf_counter() - 1,
        num_generated_tokens=5, get_pool_stats=lambda: pool, waiting_queue=[], disaggregation_mode=None,
        _graph_backend_label="cuda graph", fwd_occupancy=0.0, forward_ct=1, is_hybrid_swa=False,
        scheduler_status_logger=None, _publish_kv_events=lambda: None,
    )  # fmt: skip
    return lambda: SchedulerMetricsMixin.report_decode_stats(scheduler, True, batch)
