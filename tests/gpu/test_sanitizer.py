# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over small shapes: no access out of bounds, no race on shared memory, no bad synchronisation, and
no read of global memory that nobody has written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

BARRIERS = ["--num-cuda-barriers", "65536"]
"""mbarriers that a tool can follow. Its own estimate is too low for a process with PyTorch's kernels; past it, it warns
of an overflow, then reports hazards that are none and breaks the CUDA context."""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_clean(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    command = [
        sanitizer,
        "--tool",
        tool,
        *BARRIERS,
        "--error-exitcode",
        "9",
        sys.executable,
        str(Path(__file__).with_name("small_steps.py")),
    ]
    # torch's cache would hide an overrun that stays inside one of its segments
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "small steps: done" in done.stdout
