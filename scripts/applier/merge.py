# SPDX-License-Identifier: Apache-2.0
"""Three-way merges of one file by git, in memory."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from applier.errors import DriftError


def merge(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """git's merge of three versions; None where it has conflicts. DriftError where git can't merge at all."""
    if ours == base or ours == theirs:
        return theirs
    if base == theirs:
        return ours
    with tempfile.TemporaryDirectory() as scratch:
        files = []
        for name, data in (("tree", ours), ("release", base), ("patched", theirs)):
            files.append(Path(scratch) / name)
            files[-1].write_bytes(data)
        run = subprocess.run(["git", "merge-file", "--stdout", "--quiet", *files], capture_output=True, check=False)
    if run.returncode < 0 or run.returncode > 127:  # up to 127 it counts conflicts
        raise DriftError("git could not merge", run.stderr.decode("utf-8", "replace").splitlines())
    return run.stdout if run.returncode == 0 else None
