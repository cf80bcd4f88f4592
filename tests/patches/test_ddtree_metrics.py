# SPDX-License-Identifier: Apache-2.0
"""0005: the decode log line and the Prometheus gauges tell nodes and stage times of draft trees."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

pytestmark = pytest.mark.ddtree


def reported(trees: bool, on_device: bool = False) -> dict[str, Any]:
    """The line that the real report_decode_stats logs after two steps, and the gauges it leaves."""
    import logging
    import time
    from types import SimpleNamespace

    import releases
    import torch
    from absent_kernels import absent

    absent()
    from mla_rig import server_args
    from prometheus_client import REGISTRY
    from sglang.srt.treeverify.ddtree.stats import Stats
    from sglang.srt.treeverify.ddtree.tree import Path

    stats = Stats("cpu")
    for size in (16, 8):
        stats.begin()
        for stage in ("draft", "build", "prep", "verify", "walk"):
            time.sleep(0.002)
            stats.mark(stage)
        stats.end(torch.tensor([size, -1], dtype=torch.int32) if on_device else None)
        if not on_device:
            stats.count([Path(size, [0], [1]), Path(-1, [0], [1])])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    server_args(speculative_num_draft_tokens=16, speculative_num_steps=1, decode_log_interval=1)
    reporter = releases.imported().decode_reporter(SimpleNamespace(tree_stats=stats) if trees else None, handler)
    reporter()
    found = {"line": lines[-1], "nodes": None}
    if trees:
        from sglang.srt.treeverify.ddtree.metrics import decode_report

        stats.begin()
        stats.end()
        stats.begin()
        stats.count([Path(12, [0], [1])])
        enabled = SimpleNamespace(
            current_scheduler_metrics_enabled=True, metrics_collector=SimpleNamespace(labels={"model_name": "m"})
        )
        decode_report(enabled, SimpleNamespace(tree_stats=stats))
        found["nodes"] = REGISTRY.get_sample_value("sglang:spec_tree_nodes", {"model_name": "m"})
    return found


def test_the_log_line_tells_nodes_and_stages(patched: Worker) -> None:
    found = patched(reported, trees=True)
    assert "accept len: 2.25" in found["line"]
    assert "tree nodes: 6.5, step ms: draft " in found["line"]  # (16 + 1 + 8 + 1) / 4
    for stage in ("build", "prep", "verify", "walk", "commit"):
        assert f" {stage} " in found["line"]
    assert found["nodes"] == 12


def test_trees_that_the_host_does_not_count_are_counted_in_every_eighth_step(patched: Worker) -> None:
    assert "tree nodes: 8.5, " in patched(reported, trees=True, on_device=True)["line"]  # (16 + 1) / 2


def test_other_algorithms_have_the_line_they_had(patched: Worker) -> None:
    assert "tree" not in patched(reported, trees=False)["line"]
