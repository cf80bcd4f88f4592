# SPDX-License-Identifier: Apache-2.0
"""What people see: plain lines on stderr, progress with rich where a terminal can show it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Step = Callable[[int, int, str], None]


def note(text: str) -> None:
    """A line about what goes on; stdout is kept for results."""
    print(text, file=sys.stderr, flush=True)


def result(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


def result_json(value: Any) -> None:
    """The result for a script."""
    print(json.dumps(value, indent=1), flush=True)


@contextmanager
def progress(title: str) -> Iterator[Step]:
    """Shows work that may last: yields step(done, total, what). A bar on a terminal, a line every 5 s elsewhere."""
    try:
        if not sys.stderr.isatty():
            raise ImportError
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _plain(title)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def step(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=f"{title}: {what}" if what else title)

        yield step


def _plain(title: str) -> Step:
    last = time.monotonic()

    def step(done: int, total: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 5:
            last = time.monotonic()
            note(f"{title}: {done}/{total} {what}".rstrip())

    return step
