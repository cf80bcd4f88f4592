# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the verify kernel for sm_120: tensor-core products as counted on paper, no spills, 99 KB."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import sass_counts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rows", [8, 40])
def test_sm_120(rows, tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    source, cubin = ROOT / "kernels" / "portable" / "inst" / f"verify_bf16_r{rows}.cu", tmp_path / "kernel.cubin"
    command = [
        nvcc,
        "-std=c++17",
        "-O3",
        f"-I{ROOT / 'kernels'}",
        "-arch=sm_120",
        "-cubin",
        "-o",
        str(cubin),
        str(source),
    ]
    subprocess.run(command, check=True)
    found = sass_counts.counts(cubin, "120")[f"tv_verify_bf16_r{rows}"]
    # a tile: 9 slices of 16 dimensions for the scores, 2 x 4 blocks of positions and dimensions for the output
    assert found["HMMA"] == (9 + 2 * 4) * rows // 8
    assert found["spill"] == 0
    assert found["LDGSTS"] == 2 * 9, "16-byte asynchronous copies: 9 a thread and tile, in the prologue and in the loop"
