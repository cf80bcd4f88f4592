# SPDX-License-Identifier: Apache-2.0
"""The bench of one long request, around an engine that answers by rote: rows, resuming, goals."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from pathlib import Path
from typing import Any

import bench_long
import pytest
from bench import long
from bench.ddtree import models

ENGINE = """
    import os, sys

    class Engine:
        def __init__(self, **arguments):
            self.algorithm = arguments.get("speculative_algorithm")
            if os.environ.get("DIES") == self.algorithm:
                raise MemoryError("no room")
            print(self.algorithm, arguments["attention_backend"], os.environ.get("TREEVERIFY_DISABLE"), flush=True)

        def generate(self, input_ids, sampling_params, stream):
            new = sampling_params["max_new_tokens"]
            line = "Decode batch, #running-req: 1, cuda graph: %s, gen throughput (token/s): 9.00"
            for _ in range(2):
                print(line % (self.algorithm != "DFLASH"), file=sys.stderr)
            for tokens in (1, new):
                told = {"completion_tokens": tokens, "spec_verify_ct": new - 1, "cached_tokens": 9}
                yield {"index": 0, "meta_info": told}

        def shutdown(self):
            pass
"""
LABEL = {"card": "a card", "build": "a build"}


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The command line, with the engine above as sglang."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(ENGINE))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    out = str(tmp_path / "out" / "long.json")
    return bench_long.arguments(["--out", out, "--servers", "ngram,ngram_triton,dflash", "--runs", "2"])


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in args.out.with_suffix(".jsonl").read_text().splitlines()]


def test_every_server_is_measured_once_and_what_failed_again(args: argparse.Namespace) -> None:
    assert bench_long.run(args, LABEL, time.time() + 600) == 1
    first = rows(args)
    assert [(row["server"], row.get("failed")) for row in first] == [
        ("ngram", None), ("ngram_triton", None), ("dflash", "steps ran outside CUDA graphs")]  # fmt: skip
    assert all(row["step_ms"] > 0 and len(row["runs_ms"]) == 2 for row in first)
    assert "NGRAM triton 1" in (args.logs / "ngram_triton.log").read_text()
    assert bench_long.run(args, LABEL, time.time() + 600) == 1
    assert [row["server"] for row in rows(args)[3:]] == ["dflash"]


def test_a_spent_budget_starts_nothing(args: argparse.Namespace) -> None:
    assert bench_long.run(args, LABEL, time.time() + 10) == bench_long.OUT_OF_TIME
    assert not args.logs.exists()


def test_a_server_that_dies_says_why(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIES", "NGRAM")
    args.servers = ["ngram"]
    assert bench_long.run(args, LABEL, time.time() + 600) == 1
    assert "no room" in capsys.readouterr().out


def test_unknown_servers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_long.arguments(["--out", "x.json", "--servers", "ngram,nothing"])
    assert "nothing unknown; there are ngram," in capsys.readouterr().err


STEPS = {"ngram": 3.0, "ngram_flashinfer": 3.5, "ngram_triton": 90.0, "ddtree": 4.0, "dflash": 3.9}


def test_goals_are_met_missed_or_open() -> None:
    found = [{"server": name, "step_ms": step} for name, step in STEPS.items()]
    assert [(gate["met"], gate["got"]) for gate in long.gates(found)] == [
        (True, 30.0), (True, 0.8571), (None, None), (False, 1.026)]  # fmt: skip
    assert [gate["met"] for gate in long.gates([{**found[0], "failed": "x"}, *found[1:]])] == [None, None, None, False]
    table = long.table([{**row, "stages_ms": {"verify": 1.5}} for row in found])
    assert table[4].startswith("| NGRAM's tree, treeverify | 3.00 | verify 1.50 |") and "Triton | 90.00" in table[-1]
    assert long.table([]) == []


def test_trees_and_chains_are_as_wide_and_only_drafters_are_given(tmp_path: Path) -> None:
    target, draft = models.write(tmp_path, block=long.WIDTH)
    assert json.loads((draft / "config.json").read_text())["block_size"] == long.WIDTH
    for server in long.SERVERS.values():
        arguments = long.arguments(server, target, draft, 7)
        assert arguments.get("speculative_num_draft_tokens") == (long.WIDTH if server.algorithm else None)
        assert ("speculative_draft_model_path" in arguments) == (server.algorithm in ("DDTREE", "DFLASH"))
        assert arguments["attention_backend"] == server.backend
