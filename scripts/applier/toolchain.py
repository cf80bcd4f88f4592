# SPDX-License-Identifier: Apache-2.0
"""Finding nvcc, the host compiler and ninja."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from applier.bootstrap import apt_install, pip_install
from applier.errors import UsageError
from applier.layout import Layout
from applier.say import note

KNOWN_SINCE = {"90": (12, 0), "100": (12, 8), "103": (12, 9), "120": (12, 8), "121": (12, 9)}
"""First CUDA whose nvcc compiles for an architecture and takes our sources; 11.8 for older ones."""

PYPI_CUDA = "nvidia/cu13"
PYPI_PACKAGES = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")]


@dataclass(frozen=True)
class Nvcc:
    """A compiler and where it was found; `flags` are what a PyPI toolkit needs to find its own parts."""

    path: Path
    origin: str
    flags: tuple[str, ...] = ()

    def version(self) -> str:
        """Like "13.0.88"; UsageError where it doesn't run."""
        try:
            run = subprocess.run([self.path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        except OSError as error:
            raise UsageError(f"{self.path} does not run: {error}") from None
        match = re.search(r"V(\d+\.\d+\.\d+)", run.stdout)
        if match is None:
            raise UsageError(f"{self.path} --version says nothing we know: {(run.stdout + run.stderr).strip()[:200]!r}")
        return match[1]


def find_nvcc(layout: Layout, arches: list[str] | None = None) -> Nvcc | None:
    """CUDA_HOME, PATH, /usr/local/cuda, PyPI's nvidia-cuda-nvcc: the first that is there and knows `arches`."""
    needed = max((KNOWN_SINCE.get(arch.rstrip("af"), (11, 8)) for arch in arches or []), default=(0, 0))
    for nvcc in _candidates(layout):
        if arches is None:
            return nvcc
        version = nvcc.version()
        if tuple(map(int, version.split(".")[:2])) >= needed:
            return nvcc
        note(f"note: {nvcc.path} is {version}, too old for sm_{', sm_'.join(arches)} (CUDA {needed[0]}.{needed[1]})")
    return None


def _candidates(layout: Layout) -> Iterator[Nvcc]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            path = Path(home) / "bin" / "nvcc"
            if not path.is_file():
                raise UsageError(f"{variable}={home} has no bin/nvcc; correct it or unset it")
            yield Nvcc(path, variable)
    if on_path := shutil.which("nvcc"):
        yield Nvcc(Path(on_path), "PATH")
    if (usual := Path("/usr/local/cuda/bin/nvcc")).is_file():
        yield Nvcc(usual, "/usr/local/cuda")
    for folder in [pypi_folder(layout), Path(sysconfig.get_path("purelib")), *map(Path, sys.path)]:
        if (path := folder / PYPI_CUDA / "bin" / "nvcc").is_file():
            root = folder / PYPI_CUDA
            yield Nvcc(path, "PyPI nvidia-cuda-nvcc", (f"-I{root / 'include'}", f"-L{root / 'lib'}"))


def pypi_folder(layout: Layout) -> Path:
    """Where the tool puts its own copy of PyPI's compiler."""
    return layout.build / "cuda"


def find_host_compiler() -> Path | None:
    """What nvcc will call for the host side: $CXX, g++ or clang++."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return Path(path)
    return None


def provide_host_compiler() -> None:
    """g++ from Debian where no C++ compiler is there. UsageError with the line to type where that can't be done."""
    if find_host_compiler() is None:
        apt_install(["g++"], "nvcc")


def provide_nvcc(layout: Layout, arches: list[str] | None = None) -> Nvcc:
    """PyPI's nvcc and its parts, unpacked under build/cuda."""
    folder = pypi_folder(layout)
    pip_install(
        folder,
        PYPI_PACKAGES,
        "no nvcc that would do in CUDA_HOME, on PATH or in /usr/local/cuda: fetching PyPI's …",
    )
    nvcc = find_nvcc(layout, arches)
    if nvcc is None:
        raise UsageError(f"PyPI's packages put no nvcc below {folder}; set CUDA_HOME to a CUDA 13 toolkit")
    return nvcc


def find_ninja() -> Path | None:
    """PyPI's ninja beside this interpreter, else the one on PATH."""
    try:
        import ninja
    except ImportError:
        path = shutil.which("ninja")
        return Path(path) if path else None
    return Path(ninja.BIN_DIR) / "ninja"
