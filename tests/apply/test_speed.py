# SPDX-License-Identifier: Apache-2.0
"""The applier answers at once on the real release: seconds of CPU time, for the machine may have other work."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from checkout import ROOT


def seconds(tree: Path, *arguments: str) -> float:
    command = [sys.executable, ROOT / "apply.py", arguments[0], "--sglang", tree, *arguments[1:]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_check_takes_a_second(pristine: Path) -> None:
    assert min(seconds(pristine, "check") for _ in range(3)) <= 1.0


def test_apply_without_build_takes_three(sglang_tree: Path) -> None:
    taken = []
    for _ in range(2):
        taken.append(seconds(sglang_tree, "apply", "--no-build"))
        seconds(sglang_tree, "revert")
    assert min(taken) <= 3.0
