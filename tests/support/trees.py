# SPDX-License-Identifier: Apache-2.0
"""Real SGLang trees of a pin: as released, and patched by apply.py, which tells the pin by itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from applier.layout import CHECKOUT, cache_dir
from applier.lock import locked
from applier.obtain import fetch_wheel, unpack_release
from applier.pin import Pin


def released(pin: Pin) -> Path:
    """The release as a git repository, made from the PyPI wheel once and kept in the cache. Nobody writes to it."""
    folder = cache_dir() / "trees"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"sglang-{pin.tag}"
    with locked(folder, timeout=900):
        if not target.exists():
            unpack_release(pin, fetch_wheel(pin), target)
        subprocess.run(["git", "-C", target, "clean", "-qfdx"], check=True)  # byte code, where somebody imported it
    return target


def stock_copy(release: Path, folder: Path) -> Path:
    """A copy of the package's folder, for PYTHONPATH: imports leave byte code."""
    return Path(shutil.copytree(release / "python", folder / "python"))


def patched_copy(release: Path, folder: Path) -> Path:
    """The folder that holds the patched package, for PYTHONPATH: applied by apply.py, without kernels."""
    root = folder / "sglang"
    shutil.copytree(release, root, symlinks=True)
    command = [sys.executable, CHECKOUT.root / "apply.py", "apply", "--no-build", "--sglang", root]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return root / "python"
