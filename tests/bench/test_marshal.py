# SPDX-License-Identifier: Apache-2.0
"""bench_marshal without a GPU: every way is called, and timed, on a library whose launches do nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from applier.layout import CHECKOUT


def test_the_ways_to_call(tmp_path: Path) -> None:
    """In a process of its own: it puts empty functions in place of the kernels."""
    out = tmp_path / "marshal.json"
    command = [sys.executable, CHECKOUT.root / "scripts/bench_marshal.py", "--device", "cpu", "--calls", "50"]
    run = subprocess.run([*command, "--out", out, "--commit", "abc"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(out.read_text())
    took = {(row["call"], row["way"]): row["median_us"] for row in report["rows"]}
    assert report["commit"] == "abc" and all(row["entry"] == "empty" for row in report["rows"])
    assert set(took) == {
        ("prep", "op"), ("prep", "packed"), ("prep", "launch"), ("prep", "library"),
        ("verify", "op"), ("verify", "packed"),
    }  # fmt: skip
    assert took["prep", "launch"] < took["prep", "packed"] < took["prep", "op"]
    assert took["verify", "packed"] < took["verify", "op"]
    assert "| prep | packed |" in run.stdout
