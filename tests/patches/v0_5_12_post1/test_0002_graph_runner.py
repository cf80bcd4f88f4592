# SPDX-License-Identifier: Apache-2.0
"""0002: a capture's verify input has the runner's width, and a replay's real batch size reaches who verifies."""

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

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass


def replay(mode: str, prefixes: list[int], bs: int, n: int) -> dict[str, Any]:
    """replay_prepare of the real runner over a batch smaller than its bucket; the captured attention then runs."""
    from mla_rig import Rig, worst_row
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig = Rig(speculative_num_draft_tokens=n)
    backend, verifying = (rig.backend(),) * 2 if mode == "plain" else _hybrid(rig, mode)
    backend.init_cuda_graph_state(bs, bs * n)
    runner = rig.graph_runner(backend, bs, n)
    buffers, verify = runner.buffers, ForwardMode.TARGET_VERIFY
    rows, lens = buffers.req_pool_indices[:bs], buffers.seq_lens[:bs]
    backend.init_forward_metadata_capture_cuda_graph(bs, bs * n, rows, lens, None, verify, runner.get_spec_info(bs * n))
    captured = verifying.forward_metadata
    rows.fill_(7)  # what an earlier, fuller replay may have left
    step = rig.step(prefixes, n)
    batch = step.forward_batch("eagle")
    runner.replay_prepare(batch)
    batch.out_cache_loc, verifying.forward_metadata = buffers.out_cache_loc, captured
    real = len(prefixes) * n
    out = step.padded(bs * n - real).attend(verifying, batch)
    lengths = captured.kv_indptr[1 : bs + 1] - captured.kv_indptr[:bs]
    return {
        "tree": worst_row(out[:real], step.expected()),
        "padding": float(out[real:].abs().max()),
        "lengths": lengths.tolist(),
        "mask_bytes": buffers.custom_mask.numel(),
        "dtype": str(lens.dtype),
    }


@pytest.mark.parametrize("mode", ["plain", "prefill", "decode"])
def test_padded_rows_are_empty_and_the_tree_is_followed(patched: Worker, mode: str) -> None:
    got = patched(replay, mode=mode, prefixes=[9, 44], bs=4, n=8)
    assert got["lengths"] == [17, 52, 0, 0], got
    assert got["tree"] <= BF16 and got["padding"] == 0.0, got
    assert got["mask_bytes"] == 1, "the runner's mask buffer is not needed here"
    assert got["dtype"] == "torch.int32"


def idle() -> list[int]:
    """DP attention replays an idle rank: no request is real."""
    from mla_rig import Rig
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig = Rig()
    backend = rig.backend()
    backend.init_cuda_graph_state(2, 16)
    runner = rig.graph_runner(backend, 2, 8)
    lens = runner.buffers.seq_lens[:2]
    rows = runner.buffers.req_pool_indices[:2]
    verify = ForwardMode.TARGET_VERIFY
    backend.init_forward_metadata_capture_cuda_graph(2, 16, rows, lens, None, verify, runner.get_spec_info(16))
    batch = rig.step([5], 8).forward_batch("eagle")
    batch.forward_mode, batch.batch_size, batch.seq_lens_sum = ForwardMode.IDLE, 0, 0
    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        setattr(batch, name, getattr(batch, name)[:0])
    batch.spec_info.custom_mask = batch.spec_info.custom_mask[:0]
    runner.replay_prepare(batch)
    return backend.forward_metadata.kv_indptr[:3].tolist()


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


def test_stock_capture_takes_it_from_the_server(stock: Worker) -> None:
    assert [stock(widths, algorithm="DFLASH", n=n) for n in (3, 8)] == [8, 8]


def two_widths() -> dict[str, Any]:
    """Two runners of different widths capture on one backend; each replay uses the buffers of its own width."""
    import torch
    from mla_rig import Rig, worst_row
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.treeverify.attention import graph

    rig, verify = Rig(), ForwardMode.TARGET_VERIFY
    backend = rig.backend()
    rows, lens = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    captured, errors = {}, {}
    for n in (4, 8):
        backend.init_cuda_graph_state(2, 2 * n)
        backend.init_forward_metadata_capture_cuda_graph(2, 2 * n, rows, lens, None, verify, None)
        captured[n] = backend.forward_metadata
    for n in (8, 4, 8):
        step = rig.step([6, 31], n)
        batch = step.forward_batch("eagle")
        rows[:], lens[:] = step.req_pool_indices, step.seq_lens.int()
        graph.hand_over_raw_bs(backend, 2)
        backend.init_forward_metadata_replay_cuda_graph(
            2, rows, lens, 37, None, verify, batch.spec_info, seq_lens_cpu=step.seq_lens
        )
        backend.forward_metadata = captured[n]
        errors[str(n)] = worst_row(step.attend(backend, batch), step.expected())
    return errors


def test_two_captured_widths_live_side_by_side(patched: Worker) -> None:
    assert all(error <= BF16 for error in patched(two_widths).values())


def unannounced_replay() -> str:
    """What a replay says whose real batch size nobody handed over."""
    import torch
    from mla_rig import Rig
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig, verify = Rig(), ForwardMode.TARGET_VERIFY
    backend = rig.backend()
    rows, lens = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    backend.init_cuda_graph_state(2, 8)
    backend.init_forward_metadata_capture_cuda_graph(2, 8, rows, lens, None, verify, None)
    try:
        backend.init_forward_metadata_replay_cuda_graph(2, rows, lens, 2, None, verify, None, seq_lens_cpu=lens)
    except RuntimeError as error:
        return str(error)
    return ""


def test_padding_is_never_guessed(patched: Worker) -> None:
    assert "nobody said how many requests of this replay are real" in patched(unannounced_replay)


def dummy_run_width() -> list[str]:
    """The width ModelRunner._dummy_run gives its verify inputs, read from its code: it needs a GPU to run."""
    import ast
    import inspect
    import textwrap

    from sglang.srt.model_executor.model_runner import ModelRunner

    tree = ast.parse(textwrap.dedent(inspect.getsource(ModelRunner._dummy_run)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        ast.unparse(keyword.value)
        for call in calls
        if ast.unparse(call.func).endswith("VerifyInput")
        for keyword in call.keywords
        if keyword.arg == "draft_token_num"
    ]


def test_dummy_run_mirrors_the_capture(patched: Worker) -> None:
    assert patched(dummy_run_width) == ["num_tokens_per_bs"] * 3
