# SPDX-License-Identifier: Apache-2.0
"""The bench's processes around an engine that answers by rote: rows, resuming, budget, an engine that dies."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import bench_ddtree
import pytest
from bench.ddtree import together, turns
from bench.ddtree.speed import LEARN, STEPS, Cell

ENGINE = """
    import os, subprocess, sys, psutil

    SPIN = "while True: pass"

    def runs(process):
        try:
            known = {SPIN, "bench.ddtree.worker"} & set(process.cmdline())
            return bool(known) and process.status() not in ("stopped", "zombie")
        except psutil.NoSuchProcess:
            return False

    def others(mine):
        every = psutil.Process(os.getppid()).children(recursive=True)
        return [process.pid for process in every if process.pid not in mine and runs(process)]

    class Engine:
        def __init__(self, **arguments):
            self.width = arguments.get("speculative_num_draft_tokens", 0)
            if os.environ.get("DIES_AT") == str(self.width):
                raise MemoryError("no room")
            timed = arguments.get("load_format") == "dummy"  # a scheduler asks for requests without ever sleeping
            self.scheduler = subprocess.Popen([sys.executable, "-c", SPIN if timed else ""], start_new_session=True)
            print("started", self.width, os.environ.get("TREEVERIFY_DDTREE_ADAPT_TOKENS_FOR_TEST"), flush=True)

        def generate(self, input_ids, sampling_params, stream):
            new, line = sampling_params["max_new_tokens"], "Decode batch, #running-req: %d, cuda graph: %s, "
            if new > 8 and os.environ.get("DIES_WITHIN") == str(self.width):
                self.shutdown()
                sys.exit("the scheduler died")
            steps = {"spec_verify_ct": (new - 1) // 2} if self.width else {}
            print("beside it run", others({os.getpid(), self.scheduler.pid}), new, flush=True)
            for _ in range(3):
                print(line % (len(input_ids), self.width != 32) + "gen throughput (token/s): 500.00", file=sys.stderr)
            for tokens, more in ((1, {}), (new, steps)):
                for index in range(len(input_ids)):
                    meta = {"completion_tokens": tokens, "cached_tokens": len(input_ids[index]) - 1}
                    yield {"index": index, "meta_info": {**meta, **more}}

        def shutdown(self):
            self.scheduler.kill()
            self.scheduler.wait()
            print("stopped", self.width, flush=True)
"""

CELLS = [Cell(1024, 1), Cell(1024, 4)]


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The command line of two rounds at two cells, of 16 and 32 nodes, with the engine above as sglang."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text(textwrap.dedent(ENGINE))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(bench_ddtree, "build", lambda mode: f"build of {mode.name}")
    monkeypatch.setattr(turns, "CELLS", CELLS)
    out = str(tmp_path / "out" / "ddtree.json")
    return bench_ddtree.arguments(["--out", out, "--widths", "16,32", "--rounds", "2"])


def rows(args: argparse.Namespace) -> list[dict[str, object]]:
    journal = args.out.with_suffix(".jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def log(args: argparse.Namespace, name: str) -> str:
    return (args.logs / f"speed-{name}.log").read_text()


def test_servers_take_turns_at_each_cell_and_run_alone(args):
    args.modes = ["none", "dflash-8", "ddtree-16"]
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    found = rows(args)
    assert [(row["round"], row["bs"], row["n"]) for row in found] == [
        (number, cell.bs, n) for number, order in ((1, (1, 8, 16)), (2, (16, 8, 1))) for cell in CELLS for n in order
    ]  # fmt: skip
    assert all(row["step_ms"] > 0 and "failed" not in row for row in found)
    assert {row["raw_tokens_per_step"] for row in found} == {1.0, 2.0}
    for name in args.modes:
        assert log(args, name).count(f"beside it run [] {STEPS + 1}\n") == 4
        assert "stopped" in log(args, name)
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    assert rows(args) == found, "all is there"


def test_what_failed_is_measured_again_by_all(args):
    args.modes, args.rounds = ["none", "ddtree-32"], 1
    for number in (1, 2):
        assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
        found = [(row["n"], row.get("failed")) for row in rows(args) if row["round"] == number]
        assert sorted(found) == [(1, None)] * 2 + [(32, "steps ran outside CUDA graphs")] * 2


def test_modes_that_are_not_there_are_refused(args, capsys):
    with pytest.raises(SystemExit):
        bench_ddtree.arguments(["--out", str(args.out), "--widths", "16", "--modes", "ddtree-32"])
    assert "ddtree-32 unknown; there are none, dflash-8, ddtree-16" in capsys.readouterr().err


def test_a_spent_budget_starts_nothing(args, capsys):
    assert bench_ddtree.run("speed", args, "a card", time.time() + 10) == 3
    assert rows(args) == [] and "stopped before speed" in capsys.readouterr().out


def test_a_budget_that_ends_within_a_turn_ends_with_it(args, monkeypatch, capsys):
    args.modes, args.rounds = ["none", "ddtree-16"], 1
    with monkeypatch.context() as patch:  # once there is a row, it is much later
        patch.setattr(together, "time", SimpleNamespace(time=lambda: time.time() + (1000 if rows(args) else 0)))
        assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 3
    assert [(row["bs"], row["n"]) for row in rows(args)] == [(1, 1), (1, 16)]
    assert "stopped before round 1 of Cell(context=1024, bs=4)" in capsys.readouterr().out
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    assert [(row["bs"], row["n"]) for row in rows(args)[2:]] == [(4, 1), (4, 16)]


def test_a_server_that_dies_spares_the_others_and_is_shown(args, monkeypatch, capsys):
    args.rounds = 1
    monkeypatch.setenv("DIES_AT", "16")
    monkeypatch.setenv("DIES_WITHIN", "8")
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 1
    assert {row["n"] for row in rows(args)} == {1, 32}
    shown = capsys.readouterr().out
    assert "MemoryError: no room" in shown and "the scheduler died" in shown and "3 of 4 servers ready" in shown


def test_servers_of_acceptance_run_side_by_side(args, capsys):
    assert bench_ddtree.run("acceptance", args, "a card", time.time() + 600) == 0
    found = {(row["mode"], row["n"], row["temperature"]) for row in rows(args)}
    assert found == {(mode, n, t) for mode, n in (("dflash", 8), ("ddtree", 16), ("ddtree", 32)) for t in (0.0, 1.0)}
    assert {row["tokens_per_step"] for row in rows(args)} == {round(255 / 127, 4)}


def test_an_adaptive_server_waits_for_the_acceptance_of_its_widths(args, monkeypatch, capsys):
    monkeypatch.setattr(bench_ddtree, "build", lambda mode: "a build")
    args.widths, args.rounds, args.modes = [8, 16], 1, ["ddtree-8", "ddtree-16", "adaptive-16"]
    assert bench_ddtree.run("acceptance", args, "a card", time.time() + 600) == 0
    args.modes = ["adaptive-16"]
    assert bench_ddtree.run("speed", args, "another card", time.time() + 600) == 0
    assert "adaptive-16, speed: not measured" in capsys.readouterr().out
    assert bench_ddtree.run("speed", args, "a card", time.time() + 600) == 0
    assert [row["n"] for row in rows(args) if row["mode"] == "adaptive"] == [16] * len(CELLS)
    told = log(args, "adaptive-16")
    assert "started 16 8:2.0079,16:2.0079" in told and f"beside it run [] {LEARN}" in told
