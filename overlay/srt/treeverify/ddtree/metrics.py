# SPDX-License-Identifier: Apache-2.0
"""The part of SGLang's log line and Prometheus endpoint that is about draft trees."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stats import Report


def decode_report(reporter: Any, draft_worker: Any) -> str:
    """What the decode log line adds under DDTREE, else nothing. Sets the gauges where metrics are on.

    Args:
        reporter: SGLang's, of scheduler metrics.
        draft_worker: the scheduler's, of whatever algorithm.
    """
    stats = getattr(draft_worker, "tree_stats", None)
    if stats is None:
        return ""
    report: Report = stats.report()
    if reporter.current_scheduler_metrics_enabled:
        _publish(report, reporter.metrics_collector.labels)
    return report.line()


def _publish(report: Report, labels: dict[str, Any]) -> None:
    nodes, stage_seconds = _gauges(tuple(labels))
    nodes.labels(**labels).set(report.nodes)
    for stage, seconds in report.seconds.items():
        stage_seconds.labels(**labels, stage=stage).set(seconds)


@functools.cache
def _gauges(labels: tuple[str, ...]) -> tuple[Any, Any]:
    from prometheus_client import Gauge

    nodes = Gauge(
        name="sglang:spec_tree_nodes",
        documentation="Mean number of nodes in a draft tree, the bonus token among them.",
        labelnames=labels,
        multiprocess_mode="mostrecent",
    )
    stage_seconds = Gauge(
        name="sglang:spec_tree_stage_seconds",
        documentation="Mean device time of a stage of a tree step: draft, build, prep, verify, walk, commit.",
        labelnames=(*labels, "stage"),
        multiprocess_mode="mostrecent",
    )
    return nodes, stage_seconds
