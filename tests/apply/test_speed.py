# SPDX-License-Identifier: Apache-2.0
"""The applier answers at once on the real release. One run of some must: the machine may have other work."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from checkout import ROOT


def seconds(tree: Path, *arguments: str) -> float:
    started = time.monotonic()
    command = [sys.executable, ROOT / "apply.py", arguments[0], "--sglang", tree, *arguments[1:]]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return time.monotonic() - started


def test_check_takes_a_second(pristine: Path) -> None:
    assert any(seconds(pristine, "check") <= 1.0 for _ in range(8))


def test_apply_without_build_takes_three(sglang_tree: Path) -> None:
    for _ in range(3):
        taken = seconds(sglang_tree, "apply", "--no-build")
        seconds(sglang_tree, "revert")
        if taken <= 3.0:
            return
    raise AssertionError(f"{taken:.1f} s at the third attempt")
