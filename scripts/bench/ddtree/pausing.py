# SPDX-License-Identifier: Apache-2.0
"""Stops a server while another one is timed, and lets it go on: SIGSTOP and SIGCONT for its whole process tree.

SGLang's scheduler asks for requests in a loop that never sleeps, a core a server. Stopped processes take no core, and
nothing is launched on their behalf; their memory, that of the GPU too, stays as it is.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

LIMIT_S = 30.0
"""A process may be within a call of the driver that nothing interrupts."""


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it, whatever their process groups or sessions; [] where it is gone."""
    import psutil

    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pause(pid: int) -> None:
    """Stops a tree, and waits until it has stopped. What a process starts before its turn comes is stopped too.

    Raises:
        TimeoutError: a process goes on.
    """
    import psutil

    stopped: set[psutil.Process] = set()
    while fresh := [process for process in tree(pid) if process not in stopped]:
        for process in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped.update(fresh)
    end = time.monotonic() + LIMIT_S
    while running := [process.pid for process in stopped if _runs(process)]:
        if time.monotonic() > end:
            raise TimeoutError(f"processes {running} of a server do not stop; look for what they wait for")
        time.sleep(0.001)


def _runs(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def resume(pid: int) -> None:
    """Lets a tree go on, from the leaves to the root."""
    import psutil

    for process in reversed(tree(pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
