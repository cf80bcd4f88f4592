# SPDX-License-Identifier: Apache-2.0
"""What the GPU stages conclude from: the trace reader and the tree that is rebuilt from links. No GPU needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_trace import Trace
from tree_attention import visible_from_links


def call(name: str, at: float, correlation: int = 0, thread: int = 1) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": at, "dur": 1, "pid": 1, "tid": thread, "args": args}


def gpu(name: str, correlation: int, category: str = "kernel") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": 500, "dur": 5, "pid": 0, "tid": 7, "args": args}


def frame(name: str, at: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "python_function", "name": name, "ts": at, "dur": duration, "pid": 1, "tid": 1}


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Two workers' frames; inside the second a launch, a graph replay, and outside it three kinds of waits."""
    events = [
        frame("/x/sglang/worker.py(10): verify", 0, 50),
        frame("/x/sglang/graph.py(20): replay", 100, 50),
        call("cudaStreamSynchronize", 10),
        call("cudaMemcpyAsync", 20, correlation=3),
        gpu("Memcpy DtoH (Device -> Pageable)", 3, "gpu_memcpy"),
        call("cudaMemcpyAsync", 22, correlation=4),
        gpu("Memcpy DtoH (Device -> Pinned)", 4, "gpu_memcpy"),
        call("cudaLaunchKernelExC", 110, correlation=5),
        gpu("tv_prep(TvPrepParams)", 5),
        call("cudaGraphLaunch", 120, correlation=6),
        gpu("tv_verify_bf16_r8", 6),
        gpu("void other<int>(float*)", 6),
        call("cudaEventSynchronize", 130, thread=2),
        call("cudaStreamWaitEvent", 131),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return Trace(path)


def test_trace_tells_launches_from_replays(trace: Trace) -> None:
    (region,) = trace.regions(lambda name: name.endswith(": replay"))
    assert trace.launched_in(region) == {"tv_prep": 1, "tv_verify_bf16_r8": 1, "other": 1}
    assert trace.replayed_in(region) == {"tv_verify_bf16_r8": 1, "other": 1}


def test_trace_counts_what_makes_the_host_wait(trace: Trace) -> None:
    assert [e.name for e in trace.waits()] == ["cudaStreamSynchronize", "cudaMemcpyAsync", "cudaEventSynchronize"]
    assert trace.stacks(trace.waits()) == {
        "sglang/worker.py(10): verify [cudaStreamSynchronize]": 1,
        "sglang/worker.py(10): verify [cudaMemcpyAsync]": 1,
        "outside sglang [cudaEventSynchronize]": 1,
    }


def test_tree_from_child_and_sibling_links() -> None:
    # 0 -> 1, 2;  1 -> 3;  3 -> 4
    child = torch.tensor([[1, 3, -1, 4, -1]])
    sibling = torch.tensor([[-1, 2, -1, -1, -1]])
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert visible_from_links(child, sibling).int().tolist() == [want]


def test_links_that_miss_a_node_are_an_error() -> None:
    with pytest.raises(AssertionError, match="reach 1 of 2"):
        visible_from_links(torch.tensor([[-1, -1]]), torch.tensor([[-1, -1]]))
