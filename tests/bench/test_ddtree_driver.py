# SPDX-License-Identifier: Apache-2.0
"""The bench's processes around an engine that answers by rote: rows, resuming, budget, an engine that dies."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from pathlib import Path

import bench_ddtree
import pytest
from bench.ddtree.modes import BATCHES
from bench.ddtree.speed import CELLS

ENGINE = """
    import os, sys

    class Engine:
        def __init__(self, **arguments):
            self.width = arguments.get("speculative_num_draft_tokens", 0)
            if os.environ.get("DIES_AT") == str(self.width):
                raise MemoryError("no room")
            print("started", self.width, os.environ.get("TREEVERIFY_DDTREE_ADAPT_TOKENS_FOR_TEST"), flush=True)

        def generate(self, input_ids, sampling_params, stream):
            new, line = sampling_params["max_new_tokens"], "Decode batch, #running-req: %d, cuda graph: %s, "
            steps = {"spec_verify_ct": (new - 1) // 2} if self.width else {}
            for _ in range(3):
                print(line % (len(input_ids), self.width != 32) + "gen throughput (token/s): 500.00", file=sys.stderr)
            for tokens, more in ((1, {}), (new, steps)):
                for index in range(len(input_ids)):
                    yield {"index": index, "meta_info": {"completion_tokens": tokens, **more}}

        def shutdown(self):
            print("stopped", self.width, flush=True)
"""


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The command line of a run of 16 and 32 nodes, with the engine above as sglang."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text(textwrap.dedent(ENGINE))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(bench_ddtree, "build", lambda mode: f"build of {mode.name}")
    return bench_ddtree.arguments(["--out", str(tmp_path / "out" / "ddtree.json"), "--widths", "16,32"])


def rows(args: argparse.Namespace) -> list[dict[str, object]]:
    journal = args.out.with_suffix(".jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def test_every_server_is_measured_once_and_what_failed_again(args):
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    first = rows(args)
    assert [row["mode"] for row in first[:: len(CELLS)]] == ["dflash", "ddtree", "none", "ddtree"]
    assert {(row["n"], row.get("failed")) for row in first} == {
        (8, None), (16, None), (1, None), (32, "steps ran outside CUDA graphs")}  # fmt: skip
    assert {row["bs"] for row in first} == set(BATCHES) and all(row["step_ms"] > 0 for row in first)
    assert {row["raw_tokens_per_step"] for row in first} == {1.0, 2.0}
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    again = rows(args)[len(first) :]
    assert {row["n"] for row in again} == {32} and len(again) == len(CELLS)
    assert "stopped 16" in (args.logs / "speed-ddtree-16.log").read_text()


def test_only_the_servers_asked_for_are_measured(args, capsys):
    args.modes = ["none", "ddtree-32"]
    bench_ddtree.run("speed", args, "a card", time.time() + 600)
    assert {row["n"] for row in rows(args)} == {1, 32}
    with pytest.raises(SystemExit):
        bench_ddtree.arguments(["--out", str(args.out), "--widths", "16", "--modes", "ddtree-32"])
    assert "ddtree-32 unknown; there are dflash-8, ddtree-16, none" in capsys.readouterr().err


def test_a_spent_budget_starts_nothing(args, capsys):
    assert bench_ddtree.run("speed", args, "a card", time.time() + 10) == 3
    assert rows(args) == [] and "stopped before dflash-8, speed" in capsys.readouterr().out


def test_an_engine_that_dies_spares_the_others_and_is_shown(args, monkeypatch, capsys):
    monkeypatch.setenv("DIES_AT", "16")
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 1
    assert {row["n"] for row in rows(args)} == {8, 1, 32}
    assert "MemoryError: no room" in capsys.readouterr().out


def test_servers_of_acceptance_run_side_by_side(args, capsys):
    assert bench_ddtree.run("acceptance", args, "a card", time.time() + 600) == 0
    found = {(row["mode"], row["n"], row["temperature"]) for row in rows(args)}
    assert found == {(mode, n, t) for mode, n in (("dflash", 8), ("ddtree", 16), ("ddtree", 32)) for t in (0.0, 1.0)}
    assert {row["tokens_per_step"] for row in rows(args)} == {round(255 / 127, 4)}


def test_an_adaptive_server_waits_for_the_acceptance_of_its_widths(args, monkeypatch, capsys):
    monkeypatch.setattr(bench_ddtree, "build", lambda mode: "a build")
    args.widths = [8, 16]
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    assert "adaptive-16, speed: not measured" in capsys.readouterr().out
    assert bench_ddtree.run("acceptance", args, "a card", time.time() + 600) == 0
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    assert [row["n"] for row in rows(args) if row["mode"] == "adaptive"] == [16] * len(CELLS)
    assert "started 16 8:2.0079,16:2.0079" in (args.logs / "speed-adaptive-16.log").read_text()
    assert "started 16 None" in (args.logs / "speed-ddtree-16.log").read_text()
