# SPDX-License-Identifier: Apache-2.0
"""The mma.sync loop: what nvcc makes of it, and on a GPU what it reaches."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import sass_counts
import torch
from bench import ceilings
from bench.timer import GraphTimer, TooSlow


def test_the_loop_is_products_and_little_else(tmp_path):
    """16 independent sums, operands in registers, no spills; but for the loop itself only NOPs between."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    cubin = tmp_path / "mma.cubin"
    subprocess.run([nvcc, "-O3", "-std=c++17", "-arch=sm_120", "-cubin", "-o", cubin, ceilings.SOURCE], check=True)
    command = [sass_counts.cuobjdump(), "--dump-sass", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sums = re.findall(r"HMMA\S* (R\d+), R", listing)
    assert len(sums) == len(set(sums)) == 16
    names = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ +)?([A-Z]\w*)", listing)
    places = [i for i, name in enumerate(names) if name == "HMMA"]
    others = [name for name in names[places[0] : places[-1]] if name not in ("HMMA", "NOP")]
    assert len(others) <= 3, others
    assert not re.search(r"\b(LDL|STL|LDS)\b", listing)


@pytest.mark.gpu
def test_the_loop_reaches_what_tensor_cores_can():
    timer = GraphTimer()
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / timer(lambda: m @ m) / 1e6
    assert 0.3 * product < ceilings.mma_rate(timer) < 1.3 * product


@pytest.mark.gpu
def test_the_timer_sees_size_and_refuses_what_is_too_slow():
    few, many = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1 << 28, 1 << 30))
    timer = GraphTimer()
    assert 2.5 < timer(many.zero_) / timer(few.zero_) < 6
    with pytest.raises(TooSlow):
        GraphTimer(cap_ms=0.01)(many.zero_)
