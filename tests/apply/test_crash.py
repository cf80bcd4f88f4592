# SPDX-License-Identifier: Apache-2.0
"""A process killed anywhere in a change: the next command, whichever it is, makes the tree whole again."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import Checkout, tree_hash

CRASH = Path(__file__).resolve().parent / "crash.py"
PLENTY = 100_000
NEXT = ("status", "check", "apply", "revert")


def crash(checkout: Checkout, step: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command, killed at the given step."""
    command = checkout.command(*arguments)
    command[1:2] = [str(CRASH), str(step), str(checkout.root)]
    return subprocess.run(command, capture_output=True, text=True, env=checkout.env(), check=False)


def count_steps(checkout: Checkout, *arguments: str) -> int:
    """How many steps an undisturbed run takes."""
    run = crash(checkout, PLENTY, *arguments)
    assert run.returncode == 0, run.stderr
    match = re.search(r"steps left (\d+)", run.stdout)
    assert match
    return PLENTY - int(match[1])


@pytest.mark.parametrize("following", NEXT)
def test_whatever_command_comes_next(checkout: Checkout, following: str) -> None:
    clean = tree_hash(checkout.package)
    steps = count_steps(checkout, "apply", "--no-build")
    checkout.run("revert")
    crash(checkout, steps * 2 // 3, "apply", "--no-build")
    assert (checkout.package / "srt/treeverify/_journal/plan.json").is_file()
    run = checkout.run(following, *(["--no-build"] if following == "apply" else []))
    assert run.returncode == 0, run.stderr
    assert "rolled back" in run.stderr
    if following != "apply":
        assert tree_hash(checkout.package) == clean
    assert checkout.run("revert").returncode == 0
    assert tree_hash(checkout.package) == clean


def test_killed_at_random_times(checkout: Checkout) -> None:
    """No injection: SIGKILL from outside, any time from start to end of a run."""
    clean = tree_hash(checkout.package)
    started = time.monotonic()
    checkout.run("apply", "--no-build")
    lasts = time.monotonic() - started
    applied = tree_hash(checkout.package)
    rng = random.Random(20240607)
    for round_ in range(10):
        arguments = ("revert",) if tree_hash(checkout.package) == applied else ("apply", "--no-build")
        process = subprocess.Popen(
            checkout.command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=checkout.env()
        )
        time.sleep(rng.uniform(0.3, 1.1) * lasts)
        process.kill()
        process.wait()
        assert checkout.run("status").returncode == 0
        assert tree_hash(checkout.package) in (clean, applied), f"round {round_}"


def test_edits_made_after_a_crash_are_not_lost(checkout: Checkout) -> None:
    steps = count_steps(checkout, "apply", "--no-build")
    checkout.run("revert")
    crash(checkout, steps * 2 // 3, "apply", "--no-build")
    alpha = checkout.package / "srt/alpha.py"
    alpha.write_text(alpha.read_text() + "# mine\n")
    run = checkout.run("apply", "--no-build")
    assert run.returncode == 1 and "srt/alpha.py" in run.stderr
    assert "# mine" in alpha.read_text()


def test_forced_revert_keeps_edits_made_after_a_crash(checkout: Checkout) -> None:
    """Named in the refusal; copied aside, and the tree is the release again."""
    clean = tree_hash(checkout.package)
    steps = count_steps(checkout, "apply", "--no-build")
    checkout.run("revert")
    crash(checkout, steps * 2 // 3, "apply", "--no-build")
    assert (checkout.package / "srt/treeverify/_journal/plan.json").exists()
    edited = [checkout.package / name for name in ("srt/alpha.py", "srt/treeverify/__init__.py")]
    for path in edited:
        path.write_text(path.read_text() + "# mine\n")
    refused = checkout.run("status")
    assert refused.returncode == 1 and "srt/alpha.py (held what is in " in refused.stderr
    assert f"`python3 apply.py revert --force --sglang {checkout.package}`" in refused.stderr
    run = checkout.run("revert", "--force")
    assert run.returncode == 0 and "your edits are kept in" in run.stderr, run.stderr
    assert tree_hash(checkout.package) == clean
    for name in ("srt/alpha.py", "srt/treeverify/__init__.py"):
        assert (checkout.root / "build/edits-1" / name).read_text().endswith("# mine\n")


def test_the_injection_itself_kills(checkout: Checkout) -> None:
    """Control: without a heal the tree of a mid-way kill is neither of the two."""
    clean = tree_hash(checkout.package)
    steps = count_steps(checkout, "apply", "--no-build")
    applied = tree_hash(checkout.package)
    checkout.run("revert")
    crash(checkout, steps * 2 // 3, "apply", "--no-build")
    assert tree_hash(checkout.package) not in (clean, applied)
    assert sys.platform == "linux"
