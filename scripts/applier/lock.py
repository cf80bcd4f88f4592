# SPDX-License-Identifier: Apache-2.0
"""One writer at a time: an advisory lock on a folder, which leaves no file behind."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from applier.errors import UsageError


@contextmanager
def locked(folder: Path, timeout: float = 60.0, waiting: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Holds the lock of `folder`; UsageError when another run keeps it longer than `timeout` seconds."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + timeout
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waiting(f"another treeverify run is working on {folder}; waiting for it")
                    told = True
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another treeverify run has held {folder} for {timeout:.0f} s; nothing was changed. "
                        "Wait for it or end it, then run the command again"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
