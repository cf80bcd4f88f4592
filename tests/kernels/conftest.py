# SPDX-License-Identifier: Apache-2.0
"""Host builds of the kernels' headers, so that their arithmetic is tested as written."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def host_build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ctypes.CDLL]:
    """Compiles C++ source against kernels/ with g++ and loads it: host_build(name, source)."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "these tests need g++ (Debian: apt-get install g++)"

    def build(name: str, source: str) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp(name)
        (folder / "shim.cpp").write_text(source)
        command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{ROOT / 'kernels'}"]
        subprocess.run([*command, str(folder / "shim.cpp"), "-o", str(folder / "shim.so")], check=True)
        return ctypes.CDLL(str(folder / "shim.so"))

    return build
