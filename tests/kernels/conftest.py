# SPDX-License-Identifier: Apache-2.0
"""Host builds of the kernels' headers, so that their arithmetic is tested as written."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import emulator
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def host_build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ctypes.CDLL]:
    """Compiles C++ source against kernels/ with g++ and loads it: host_build(name, source)."""
    compiler = emulator.compiler()

    def build(name: str, source: str) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp(name)
        (folder / "shim.cpp").write_text(source)
        command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{ROOT / 'kernels'}"]
        subprocess.run([*command, str(folder / "shim.cpp"), "-o", str(folder / "shim.so")], check=True)
        return ctypes.CDLL(str(folder / "shim.so"))

    return build


@pytest.fixture(scope="session")
def same_layout(host_build: Callable[[str, str], ctypes.CDLL]) -> Callable[[str, str, type[ctypes.Structure]], None]:
    """same_layout(header, name, mirror): the C struct has the mirror's fields, where and as large as there."""

    def check(header: str, name: str, mirror: type[ctypes.Structure]) -> None:
        fields = [f[0] for f in mirror._fields_]
        rows = ", ".join(f"{{offsetof({name}, {f}), sizeof({name}::{f})}}" for f in fields)
        source = f"""
        #include <stddef.h>
        #include "{header}"
        static const size_t rows[][2] = {{{rows}}};
        extern "C" size_t total() {{ return sizeof({name}); }}
        extern "C" size_t at(int i, int what) {{ return rows[i][what]; }}
        """
        lib = host_build(name, source)
        lib.total.restype = lib.at.restype = ctypes.c_size_t
        for i, field in enumerate(fields):
            found = getattr(mirror, field)
            assert (found.offset, found.size) == (lib.at(i, 0), lib.at(i, 1)), field
        assert ctypes.sizeof(mirror) == lib.total()

    return check


@pytest.fixture(scope="session")
def emulator_build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """emulator_build(name, cuda=True): emulator.build, loaded."""

    def build(name: str, cuda: bool = True) -> ctypes.CDLL:
        return ctypes.CDLL(str(emulator.build(name, tmp_path_factory.mktemp("emulator"), cuda)))

    return build
