# SPDX-License-Identifier: Apache-2.0
"""Builds tests/kernels/emulator: the kernels' own code by g++, with the emulator's instructions in place of PTX."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
EMULATOR, KERNELS = TESTS / "kernels" / "emulator", TESTS.parent / "kernels"


def compiler() -> str:
    """g++, or what stands for it."""
    found = shutil.which("g++") or shutil.which("c++")
    assert found, "these tests need g++ (Debian: apt-get install g++)"
    return found


def build(name: str, folder: Path, cuda: bool = True) -> Path:
    """Path of a shared library made of emulator/NAME.cpp. Skips the test where that cannot be made.

    Args:
        cuda: whether it needs CUDA's headers.
    """
    if platform.machine() != "x86_64":
        pytest.skip("the emulator switches its fibers in x86-64 assembly")
    target = folder / f"{name}.so"
    # -fno-gnu-unique: else libraries in one process share their inline variables, the emulated block among them.
    flags = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-fno-gnu-unique", "-w", "-fPIC", "-shared"]
    folders = [f"-I{EMULATOR}", f"-I{KERNELS}", *(["-isystem", _cuda_headers()] if cuda else [])]
    subprocess.run([compiler(), *flags, *folders, str(EMULATOR / f"{name}.cpp"), "-o", str(target)], check=True)
    return target


def _cuda_headers() -> str:
    """The folder of CUDA's headers, as nvcc itself says: the one on PATH may be a script that calls another."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH, for the headers it comes with")
    steps = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=True)
    found = re.search(r'INCLUDES="-I([^"]+)"', steps.stderr)
    assert found, f"nvcc --dryrun names no include folder:\n{steps.stderr}"
    return found[1]
