# SPDX-License-Identifier: Apache-2.0
"""Two runs on one tree: the second waits, and nothing is mixed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from applier.errors import UsageError
from applier.lock import locked
from checkout import Checkout, tree_hash


def test_concurrent_applies_and_reverts(checkout: Checkout) -> None:
    clean = tree_hash(checkout.package)
    checkout.run("apply", "--no-build")
    applied = tree_hash(checkout.package)
    for command in (["revert"], ["apply", "--no-build"]):
        runs = [
            subprocess.Popen(
                checkout.command(*command),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=checkout.env(),
            )
            for _ in range(4)
        ]
        ended = [(run.communicate()[1], run.returncode) for run in runs]
        assert all(code == 0 or "changed while the command ran" in error for error, code in ended), ended
        assert any(code == 0 for _, code in ended)
        assert tree_hash(checkout.package) == (clean if command == ["revert"] else applied)


def test_some_of_many_are_killed(checkout: Checkout) -> None:
    """Applies, reverts and looks at once, every other one killed at some time: old or new, and status tells which."""
    states = {tree_hash(checkout.package): "clean"}
    assert checkout.run("apply", "--no-build").returncode == 0
    states[tree_hash(checkout.package)] = "applied"
    commands = [["apply", "--no-build"], ["revert"], ["status"], ["revert"], ["apply", "--no-build"], ["check"]]
    runs = [
        subprocess.Popen(
            checkout.command(*command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=checkout.env()
        )
        for command in commands
    ]
    rng = random.Random(7)
    for run in runs[::2]:
        time.sleep(rng.uniform(0, 0.4))
        run.kill()
    said = [(run.communicate()[1], run.returncode) for run in runs]
    assert all(code in (0, 1, -signal.SIGKILL) and "Traceback" not in error for error, code in said), said
    told = checkout.run("status", "--json")
    assert told.returncode == 0 and json.loads(told.stdout)["state"] == states[tree_hash(checkout.package)]
    assert checkout.run("revert").returncode == 0 and states[tree_hash(checkout.package)] == "clean"


def test_waiting_ends(tmp_path: Path) -> None:
    told: list[str] = []
    hold = "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom applier.lock import locked\n"
    hold += "with locked(Path(sys.argv[2])): print('held', flush=True); sys.stdin.read()"
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, scripts, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match="another treeverify run"), locked(tmp_path, timeout=0.3, waiting=told.append):
        pass
    assert told
    holder.communicate()
    with locked(tmp_path, timeout=0.3):
        assert not list(tmp_path.iterdir()), "the lock leaves no file"
