# SPDX-License-Identifier: Apache-2.0
"""0002: what this release's graph runner must be told: widths, the real batch size, and that it needs no mask."""

from __future__ import annotations

import pytest
from worker import Worker


def capture_width(n: int) -> int:
    """Width of the verify input that a runner of width n captures with, where the server's argument says 8."""
    from mla_rig import Rig

    rig = Rig(speculative_algorithm="DFLASH", speculative_num_draft_tokens=8, speculative_eagle_topk=1)
    width = rig.graph_runner(rig.backend(), 2, n).get_spec_info(2 * n).draft_token_num
    return int(width)


def test_stock_capture_takes_its_width_from_the_server(stock: Worker, patched: Worker) -> None:
    assert [stock(capture_width, n=n) for n in (3, 8)] == [8, 8]
    assert [patched(capture_width, n=n) for n in (3, 8)] == [3, 8]


def mask_bytes(backend: str) -> int:
    """Elements of the graph runner's mask buffer, which no captured kernel of ours reads."""
    import os

    from mla_rig import Rig

    os.environ["TREEVERIFY_TRITON"] = "1"
    rig = Rig(attention_backend=backend)
    attention = rig.backend()
    del os.environ["TREEVERIFY_TRITON"]
    return int(rig.graph_runner(attention, 4, 8).buffers.custom_mask.numel())


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_the_runner_needs_no_mask_buffer(patched: Worker, backend: str) -> None:
    assert patched(mask_bytes, backend=backend) == 1


def unannounced_replay() -> str:
    """What a replay says whose real batch size nobody handed over."""
    import torch
    from mla_rig import Rig

    rig = Rig()
    backend = rig.backend()
    rows, lens = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    backend.init_cuda_graph_state(2, 8)
    rig.release.capture(backend, 2, 4, rows, lens)
    try:
        rig.release.replay(backend, rows, lens, None, 2, None)
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
