#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests: makes build/venv-tests with all they need (once), then pytest with the arguments given.

    python3 scripts/run_tests.py [pytest arguments]

The whole suite runs in a process a core, up to four; in one where there is a GPU, and where files or -n are given.
Where the running interpreter has everything already, it is used as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"{sys.argv[0]} needs Python 3.10 or newer")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from applier import bootstrap
from applier.arch import found_gpus
from applier.errors import UsageError
from applier.layout import CHECKOUT
from applier.requirements import satisfied
from applier.say import note
from applier.toolchain import provide_host_compiler

TORCH = "torch==2.13.0"
MOST_WORKERS = 4  # each may hold two processes with SGLang in them, about 1 GB apiece
OWN = CHECKOUT.root / "tests" / "requirements.txt"
SGLANG = CHECKOUT.root / "tests" / "requirements-sglang.txt"  # a closed list: installed without looking at dependencies


def main(arguments: list[str]) -> int:
    try:
        bootstrap.provide_command("git", "git", "the tests")
        provide_host_compiler()
        python = _python()
    except UsageError as error:
        note("\n  ".join([f"error: {error.message}", *error.details]))
        return error.exit_code
    os.chdir(CHECKOUT.root)
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    workers = _workers(arguments)
    environment = {**os.environ, "PATH": path}
    if workers > 1:
        arguments = ["-n", str(workers), *arguments]
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // workers)))
    os.execve(python, [python, "-m", "pytest", *arguments], environment)


def _workers(arguments: list[str]) -> int:
    """How many processes share the tests; one card serves one at a time."""
    chosen = any(argument.startswith(("-n", "--dist", "--pdb", "--co")) for argument in arguments)
    named = any(Path(argument.split("::")[0]).exists() for argument in arguments)
    return 1 if chosen or named or found_gpus() else min(_cores(), MOST_WORKERS)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _python() -> str:
    """An interpreter that can run the tests."""
    wanted = [TORCH, *OWN.read_text(encoding="utf-8").splitlines(), *SGLANG.read_text(encoding="utf-8").splitlines()]
    if satisfied(wanted):
        return sys.executable
    installs = [[TORCH], ["-r", str(OWN)], ["--no-deps", "-r", str(SGLANG)]]
    return str(bootstrap.environment(CHECKOUT.build / "venv-tests", wanted, "the tests", installs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
