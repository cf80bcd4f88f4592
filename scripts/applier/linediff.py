# SPDX-License-Identifier: Apache-2.0
"""git's diff of two versions of a file, as text and as hunks; the same bytes on every machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from applier.bootstrap import provide_command
from applier.errors import DriftError
from applier.hunks import Hunk
from applier.patchset import parse_hunks

FLAGS = (
    "--no-index --no-color --no-ext-diff --no-textconv --no-renames --text --diff-algorithm=myers --indent-heuristic "
    "--no-prefix --inter-hunk-context=0"
).split()
SILENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def unified(path: str, old: bytes, new: bytes, context: int = 3) -> bytes:
    """The diff of one file, named a/`path` and b/`path`, without blob ids; empty where nothing changed."""
    if old == new:
        return b""
    provide_command("git", "git", "making a diff")
    with tempfile.TemporaryDirectory() as scratch:
        for side, data in (("a", old), ("b", new)):
            file = Path(scratch) / side / path
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        environment |= {**SILENT, "GIT_CEILING_DIRECTORIES": str(Path(scratch).parent)}
        quoting = ["-c", "core.quotePath=false", "-c", f"core.attributesFile={os.devnull}"]
        command = ["git", *quoting, "diff", *FLAGS, f"--unified={context}", "a", "b"]
        run = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, check=False)
    if run.returncode != 1:
        raise DriftError(f"git could not compare two versions of {path}", run.stderr.decode().splitlines())
    head, at, hunks = run.stdout.partition(b"\n@@ ")
    kept = [line for line in head.split(b"\n") if not line.startswith(b"index ")]
    return b"\n".join(kept) + at + hunks


def changes(old: bytes, new: bytes) -> list[Hunk]:
    """The changed lines alone, without context."""
    return parse_hunks(unified("file", old, new, context=0))


def changed_lines(old: bytes, new: bytes) -> tuple[int, int]:
    """Lines added and removed."""
    hunks = changes(old, new)
    return sum(len(hunk.new) for hunk in hunks), sum(len(hunk.old) for hunk in hunks)
