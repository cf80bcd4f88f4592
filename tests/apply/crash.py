# SPDX-License-Identifier: Apache-2.0
"""Runs apply.py and kills the process at the n-th step that touches the disk: python crash.py N CHECKOUT ARGUMENTS…

A step is every write-open, flush, rename, unlink, mkdir and rmdir, so a kill may fall between any two of
them, or in the middle of a file (a kill at a flush leaves half of its bytes).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_left = int(sys.argv[1])


def _step() -> None:
    global _left  # noqa: PLW0603
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _left -= 1


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **options: Any) -> Any:
        _step()
        return function(*arguments, **options)

    return wrapper


def _tearing(fsync: Callable[[int], None]) -> Callable[[int], None]:
    """A kill at a flush leaves half of the file, as a power cut would."""

    def wrapper(descriptor: int) -> None:
        if _left == 0 and (size := os.fstat(descriptor).st_size) and not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.ftruncate(descriptor, size // 2)
        _step()
        fsync(descriptor)

    return wrapper


if __name__ == "__main__":
    root = Path(sys.argv[2])
    sys.argv[:] = [str(root / "apply.py"), *sys.argv[3:]]
    sys.path.insert(0, str(root / "scripts"))
    from applier import cli

    for name in ("replace", "unlink", "mkdir", "rmdir", "chmod", "rename"):
        setattr(os, name, _counted(getattr(os, name)))
    os.fsync = _tearing(os.fsync)
    shutil.rmtree = _counted(shutil.rmtree)  # type: ignore[assignment]
    code = cli.main(sys.argv[1:])
    print(f"steps left {_left}")
    sys.exit(code)
