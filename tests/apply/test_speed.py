# SPDX-License-Identifier: Apache-2.0
"""The applier answers at once on the real release.

Processor time, for the machine may have other work; and measured against a yardstick run beside it, for that work
slows a processor second down as well. On a quiet machine the yardstick takes about 0.35 s."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from checkout import ROOT

YARDSTICK = "import ast, pathlib, sys\nfor file in pathlib.Path(sys.argv[1]).glob('*.py'): ast.parse(file.read_bytes())"


def seconds(*command: object) -> float:
    """Processor seconds of a Python and its children."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def yardstick(tree: Path) -> float:
    """Python reading the scheduler's sources and taking them apart: 1.1 MB."""
    return seconds("-c", YARDSTICK, tree / "python/sglang/srt/managers")


def applier(tree: Path, command: str, *arguments: str) -> float:
    return seconds(ROOT / "apply.py", command, "--sglang", tree, *arguments)


def test_check_takes_a_second(pristine: Path) -> None:
    applier(pristine, "check")  # from now on its bytecode is there
    ratios = [applier(pristine, "check") / yardstick(pristine) for _ in range(3)]
    assert min(ratios) <= 2.5, ratios


def test_apply_without_build_takes_three(sglang_tree: Path) -> None:
    ratios = []
    for _ in range(2):
        ratios.append(applier(sglang_tree, "apply", "--no-build") / yardstick(sglang_tree))
        applier(sglang_tree, "revert")
    assert min(ratios) <= 7.5, ratios
