# SPDX-License-Identifier: Apache-2.0
"""The bench of moves on the CPU: the op's reference, a wall clock, small pools; and what it concludes."""

from __future__ import annotations

import json

import bench_kv
import pytest
import torch
from bench.kv import Move, MoveBench, Pools, gates, payback

COMMAND = ["--device", "cpu", "--layers", "3", "--rows", "16", "40", "--contexts", "40"]


def test_a_second_run_measures_nothing_again(tmp_path):
    out = tmp_path / "kv.json"
    assert bench_kv.main([*COMMAND, "--out", str(out), "--budget-s", "0"]) == 3
    assert bench_kv.main([*COMMAND, "--out", str(out), "--commit", "abc"]) == 0
    first = json.loads(out.read_text())
    told = [(row["what"], row.get("rows"), row["slots"], row.get("bs"), row.get("kv")) for row in first["rows"]]
    layouts = ["random", "gather", "contiguous"]
    assert told == [
        *(("move", rows, slots, 0, None) for rows in (16, 40) for slots in layouts),
        *(("step", 0, "paths", bs, None) for bs in (1, 8, 32)),
        *(("verify", None, slots, 1, 40) for slots in ("random", "contiguous", "paged")),
    ]
    assert all("us" in row and "wrong" not in row and "failed" not in row for row in first["rows"])
    assert [row["kv"] for row in first["payback"]] == [40] and first["commit"] == "abc"
    journal = out.with_suffix(".jsonl").read_text()
    assert bench_kv.main([*COMMAND, "--out", str(out)]) == 0
    assert out.with_suffix(".jsonl").read_text() == journal


def test_moves_are_what_they_are_called():
    pools = Pools.of(2, 4000, torch.device("cpu"))
    for slots in ("random", "gather", "contiguous"):
        src, dst, group = pools.lists(Move(1000, slots))
        assert group == 0 and len({*src.tolist(), *dst.tolist()}) == 2000
        assert [bool((at.diff() == 1).all()) for at in (src, dst)] == [slots == "contiguous", slots != "random"]
    src, dst, group = pools.lists(Move(0, "paths", 8))
    assert group == 15 and len(src) == len(set(dst.tolist())) == 120 and bool((src >= dst).all())


def test_rows_that_went_elsewhere_are_told(monkeypatch):
    bench = MoveBench(Pools.of(2, 300, torch.device("cpu")), lambda run: 1.0, 0.0, {})
    assert "wrong" not in bench(Move(50, "random"))
    monkeypatch.setattr("bench.kv.ops.kv_move", lambda *args: None)
    assert bench(Move(50, "random"))["wrong"] is True


def test_goals():
    rows = [
        {"what": "move", "rows": 1024, "of_copy": 0.3}, {"what": "move", "rows": 4096, "of_copy": 0.7},
        {"what": "move", "rows": 65536, "of_copy": 0.5}, {"what": "step", "bs": 8, "us": 9.0},
    ]  # fmt: skip
    assert [(gate["found"], gate["met"]) for gate in gates(rows)] == [(0.5, False), (9.0, True), (0, True)]
    assert [gate["met"] for gate in gates([])] == [None, None, True]


@pytest.mark.parametrize(("contiguous", "steps"), [(80.0, 3.0), (100.0, None), (120.0, None)])
def test_what_contiguous_slots_are_worth(contiguous, steps):
    rows = [
        {"what": "verify", "kv": 9, "slots": "random", "us": 100.0},
        {"what": "verify", "kv": 9, "slots": "contiguous", "us": contiguous},
        {"what": "verify", "kv": 5, "slots": "random", "us": 1.0},
        {"what": "move", "rows": 9, "slots": "gather", "us": 3600.0},
    ]
    [worth] = payback(rows, 60)
    assert worth["kv"] == 9 and worth["steps_to_pay"] == steps
