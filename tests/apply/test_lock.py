# SPDX-License-Identifier: Apache-2.0
"""Two runs on one tree: the second waits, and nothing is mixed."""

from __future__ import annotations

import subprocess
import sys
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
