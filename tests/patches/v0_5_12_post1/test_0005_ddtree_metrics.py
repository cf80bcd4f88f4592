# SPDX-License-Identifier: Apache-2.0
"""0005: the decode log line and the Prometheus gauges tell nodes and stage times of draft trees."""

from __future__ import annotations

from typing import Any

from worker import Worker


def reported(trees: bool) -> dict[str, Any]:
    """The line that the real report_decode_stats logs after two steps, and the gauges it leaves."""
    import logging
    import time
    from types import SimpleNamespace

    from absent_kernels import absent

    absent()
    from mla_rig import server_args
    from prometheus_client import REGISTRY
    from sglang.srt.observability.scheduler_metrics_mixin import SchedulerMetricsMixin, logger
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.treeverify.ddtree.stats import Stats
    from sglang.srt.treeverify.ddtree.tree import Path

    stats = Stats("cpu")
    for size in (16, 8):
        stats.begin()
        for stage in ("draft", "build", "prep", "verify", "walk"):
            time.sleep(0.002)
            stats.mark(stage)
        stats.end()
        stats.count([Path(size, [0], [1]), Path(-1, [0], [1])])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    pool = SimpleNamespace(get_decode_usage_msg_parts=lambda: ["#token: 1"], update_scheduler_stats=lambda _: None)
    batch = SimpleNamespace(reqs=[], forward_iter=1, batch_size=lambda: 2, dp_cooperation_info=None)
    scheduler = SimpleNamespace(
        server_args=server_args(speculative_num_draft_tokens=16, decode_log_interval=1), running_batch=batch,
        spec_algorithm=SpeculativeAlgorithm.DFLASH, draft_worker=SimpleNamespace(tree_stats=stats) if trees else None,
        spec_num_accept_tokens=9, spec_num_forward_ct=4, spec_total_num_accept_tokens=0, spec_total_num_forward_ct=0,
        current_scheduler_metrics_enabled=False, is_stats_logging_rank=True, enable_mfu_metrics=False,
        forward_ct_decode=0, last_decode_stats_tic=time.perf_counter() - 1, num_generated_tokens=5,
        get_pool_stats=lambda: pool, waiting_queue=[], disaggregation_mode=None, _graph_backend_label="cuda graph",
        fwd_occupancy=0.0, forward_ct=1, is_hybrid_swa=False, scheduler_status_logger=None,
        _publish_kv_events=lambda: None,
    )  # fmt: skip
    SchedulerMetricsMixin.report_decode_stats(scheduler, True, batch)
    found = {"line": lines[-1], "nodes": None, "stages": {}}
    if trees:
        from sglang.srt.treeverify.ddtree.metrics import decode_report

        stats.begin()
        stats.end()
        stats.begin()
        stats.count([Path(12, [0], [1])])
        scheduler.current_scheduler_metrics_enabled = True
        scheduler.metrics_collector = SimpleNamespace(labels={"model_name": "m"})
        decode_report(scheduler)
        found["nodes"] = REGISTRY.get_sample_value("sglang:spec_tree_nodes", {"model_name": "m"})
    return found


def test_the_log_line_tells_nodes_and_stages(patched: Worker) -> None:
    found = patched(reported, trees=True)
    assert "accept len: 2.25" in found["line"]
    assert "tree nodes: 6.5, step ms: draft " in found["line"]  # (16 + 1 + 8 + 1) / 4
    for stage in ("build", "prep", "verify", "walk", "commit"):
        assert f" {stage} " in found["line"]
    assert found["nodes"] == 12


def test_other_algorithms_have_the_line_they_had(patched: Worker) -> None:
    assert "tree" not in patched(reported, trees=False)["line"]
