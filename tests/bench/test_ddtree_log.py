# SPDX-License-Identifier: Apache-2.0
"""The scheduler's decode lines: fields, stage times, and step time from whole windows only."""

from __future__ import annotations

import pytest
from bench.ddtree.decode_log import Tail, parse, summary

PREFILL = "[2026-01-01 00:00:00] Prefill batch, #new-seq: 4, #new-token: 4, #cached-token: 4092, token usage: 0.00"
HEAD = "[2026-01-01 00:00:00] Decode batch, "


def tree(requests: int = 4, verify: float = 1.5, rate: float = 2000.0, graph: bool = True) -> str:
    return (
        f"{HEAD}#running-req: {requests}, #token: 4096, token usage: 0.01, accept len: 1.25, accept rate: 0.02, "
        f"tree nodes: 15.5, step ms: draft 0.52 build 0.03 prep 0.10 verify {verify:.2f} walk 0.08 commit 0.20, "
        f"cuda graph: {graph}, gen throughput (token/s): {rate:.2f}, #queue-req: 0"
    )


def test_a_line_of_a_tree_server_is_read_whole():
    (line,) = parse(tree())
    assert line.requests == 4 and line.accepted == 1.25 and line.nodes == 15.5 and line.throughput == 2000.0
    assert line.stages_ms == {"draft": 0.52, "build": 0.03, "prep": 0.1, "verify": 1.5, "walk": 0.08, "commit": 0.2}
    assert line.graph and not line.follows


def test_a_line_without_speculation_has_neither_tree_nor_acceptance():
    plain = f"{HEAD}#running-req: 1, #token: 9, token usage: 0.00, cuda graph: False, gen throughput (token/s): 600.00"
    (line,) = parse(plain)
    assert (line.accepted, line.nodes, line.stages_ms, line.graph) == (1.0, None, {}, False)


def test_the_report_that_the_server_writes_is_understood():
    from treeverify.ddtree.stats import STAGES, Report

    seconds = {stage: 1e-4 * (i + 1) for i, stage in enumerate(STAGES)}
    (line,) = parse(tree().replace(tree().split("rate: 0.02, ")[1].split("cuda graph")[0], Report(9.0, seconds).line()))
    assert line.nodes == 9.0
    assert line.stages_ms == pytest.approx({stage: 1e3 * s for stage, s in seconds.items()})


def test_a_window_with_a_prefill_in_it_has_no_step_time():
    lines = list(parse("\n".join([tree(), PREFILL, tree(rate=100.0), tree(rate=2000.0), tree(rate=1000.0)])))
    assert [line.follows for line in lines] == [False, False, True, True]
    found = summary(lines, bs=4)
    assert found.step_ms == pytest.approx(1e3 * 4 * 1.25 * (1 / 2000 + 1 / 1000) / 2)


def test_partial_batches_and_the_first_line_are_left_out():
    lines = list(parse("\n".join([tree(verify=9), tree(requests=3, verify=7), tree(verify=1), tree(verify=2)])))
    assert summary(lines, bs=4).stages_ms["verify"] == pytest.approx(1.5)


def test_one_step_outside_a_graph_tells():
    lines = list(parse("\n".join([tree(), tree(), tree(graph=False)])))
    assert summary(lines[:2], 4).graph and not summary(lines, 4).graph
    assert not summary([], 4).graph


def test_the_tail_gives_what_was_added_in_whole_lines(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = Tail(path)
    with path.open("a") as file:
        file.write("new\nha")
    assert tail.read() == "new\n"
    with path.open("a") as file:
        file.write("lf\n")
    assert tail.read() == "half\n" and tail.read() == ""
