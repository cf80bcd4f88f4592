# SPDX-License-Identifier: Apache-2.0
"""The graph runner: a capture's verify input has its width, and a replay's real batch size reaches who verifies."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

BF16 = 5e-3


def _hybrid(rig: Any, mode: str) -> Any:
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    rig.args.speculative_attention_mode = mode
    other = "decode_attention_backend" if mode == "prefill" else "prefill_attention_backend"
    setattr(rig.args, other, "triton")
    verifying, idle = rig.backend(), _Unused()
    halves = (verifying, idle) if mode == "prefill" else (idle, verifying)
    return HybridAttnBackend(rig.runner, *halves), verifying


class _Unused:
    """The half of a hybrid backend that a verify step must leave alone."""

    needs_cpu_seq_lens = False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass


def replay(mode: str, prefixes: list[int], bs: int, n: int) -> dict[str, Any]:
    """The real runner's replay over a batch smaller than its bucket; the captured attention then runs."""
    from mla_rig import Rig, worst_row

    rig = Rig(speculative_num_draft_tokens=n)
    backend, verifying = (rig.backend(),) * 2 if mode == "plain" else _hybrid(rig, mode)
    backend.init_cuda_graph_state(bs, bs * n)
    runner = rig.graph_runner(backend, bs, n)
    buffers = runner.buffers
    rig.release.runner_captures(runner)
    captured = verifying.forward_metadata
    buffers.req_pool_indices.fill_(7)  # what an earlier, fuller replay may have left
    step = rig.step(prefixes, n)
    batch = step.forward_batch("eagle")
    rig.release.runner_replays(runner, batch)
    batch.out_cache_loc, verifying.forward_metadata = buffers.out_cache_loc, captured
    real = len(prefixes) * n
    out = step.padded(bs * n - real).attend(verifying, batch)
    lengths = captured.kv_indptr[1 : bs + 1] - captured.kv_indptr[:bs]
    return {
        "tree": worst_row(out[:real], step.expected()),
        "padding": float(out[real:].abs().max()),
        "lengths": lengths.tolist(),
        "dtype": buffers.seq_lens.dtype == rig.release.SEQ_LENS,
    }


@pytest.mark.parametrize("mode", ["plain", "prefill", "decode"])
def test_padded_rows_are_empty_and_the_tree_is_followed(patched: Worker, mode: str) -> None:
    got = patched(replay, mode=mode, prefixes=[9, 44], bs=4, n=8)
    assert got["lengths"] == [17, 52, 0, 0], got
    assert got["tree"] <= BF16 and got["padding"] == 0.0 and got["dtype"], got


def idle() -> list[int]:
    """DP attention replays an idle rank: no request is real."""
    from mla_rig import Rig
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig = Rig()
    backend = rig.backend()
    backend.init_cuda_graph_state(2, 16)
    runner = rig.graph_runner(backend, 2, 8)
    rig.release.runner_captures(runner)
    batch = rig.step([5], 8).forward_batch("eagle")
    batch.forward_mode, batch.batch_size, batch.seq_lens_sum = ForwardMode.IDLE, 0, 0
    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        setattr(batch, name, getattr(batch, name)[:0])
    batch.spec_info.custom_mask = batch.spec_info.custom_mask[:0]
    rig.release.runner_replays(runner, batch)
    return [int(at) for at in backend.forward_metadata.kv_indptr[:3]]


def test_idle_replay_has_no_requests(patched: Worker) -> None:
    assert patched(idle) == [0, 0, 0]


def widths(algorithm: str, n: int) -> int:
    """Width of the verify input that a runner of width n captures with, whatever the server's argument says."""
    from mla_rig import Rig

    rig = Rig(speculative_algorithm=algorithm, speculative_num_draft_tokens=8, speculative_eagle_topk=1)
    backend = rig.backend()
    width = rig.graph_runner(backend, 2, n).get_spec_info(2 * n).draft_token_num
    return int(width)


@pytest.mark.parametrize("algorithm", ["EAGLE", "DFLASH", "NGRAM"])
def test_capture_takes_its_width_from_the_runner(patched: Worker, algorithm: str) -> None:
    assert [patched(widths, algorithm=algorithm, n=n) for n in (3, 8)] == [3, 8]


def two_widths() -> dict[str, Any]:
    """Two runners of different widths capture on one backend; each replay uses the buffers of its own width."""
    import torch
    from mla_rig import Rig, worst_row

    rig = Rig()
    backend = rig.backend()
    rows, lens = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=rig.release.SEQ_LENS)
    captured, errors = {}, {}
    for n in (4, 8):
        backend.init_cuda_graph_state(2, 2 * n)
        rig.release.capture(backend, 2, n, rows, lens)
        captured[n] = backend.forward_metadata
    for n in (8, 4, 8):
        step = rig.step([6, 31], n)
        batch = step.forward_batch("eagle")
        rows[:], lens[:] = step.req_pool_indices, step.seq_lens
        rig.release.replay(backend, rows, lens, 2, 37, batch.spec_info)
        backend.forward_metadata = captured[n]
        errors[str(n)] = worst_row(step.attend(backend, batch), step.expected())
    return errors


def test_two_captured_widths_live_side_by_side(patched: Worker) -> None:
    assert all(error <= BF16 for error in patched(two_widths).values())
