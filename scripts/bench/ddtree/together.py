# SPDX-License-Identifier: Apache-2.0
"""The stage `speed`: servers side by side on one GPU, of which one runs at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from ..store import Row, Store
from .pausing import pause, resume
from .processes import Running, finish, kill
from .speed import Cell
from .turns import Turn
from .worker import OUT_OF_TIME

TURN_S = 15.0
"""All servers at one cell: no turn begins with less of the budget left, or than the longest one took."""

HANGS_S = 60
"""A run that takes longer never ends."""

STOP_S = 15
"""For an engine to shut down; then it is killed."""


def measure(running: Sequence[Running], turns: Sequence[Turn], store: Store, deadline: float) -> int:
    """Takes the turns with all servers that come up, and stops them; returns the exit code.

    Args:
        deadline: seconds since the epoch.
    """
    cells = list(dict.fromkeys(turn.cell for turn in turns))
    begin, ready = time.time(), wait_until_ready(running, cells, deadline)
    print(f"speed: {len(ready)} of {len(running)} servers ready in {time.time() - begin:.0f} s", flush=True)
    in_time = time.time() < deadline and take(ready, turns, store, deadline)
    codes = stop(running)
    return int(any(codes)) if in_time or set(codes) - {0, OUT_OF_TIME} else OUT_OF_TIME


def wait_until_ready(running: Sequence[Running], cells: Sequence[Cell], deadline: float) -> list[Running]:
    """Those that started and prefilled the cells' contexts, each paused as soon as it had."""
    waiting: dict[Any, Running] = {one.link: one for one in running if _tell(one, cells)}
    ready = []
    while waiting and (heard := wait(list(waiting), _left(deadline))):
        for one in map(waiting.pop, heard):
            if _hear(one) is not None:
                pause(one.process.pid)
                ready.append(one.server)
    return [one for one in running if one.server in ready]


def take(ready: Sequence[Running], turns: Sequence[Turn], store: Store, deadline: float) -> bool:
    """Measures turn by turn; False where the deadline is too near for the next one."""
    alive, longest = {one.server: one for one in ready}, TURN_S
    for turn in turns:
        begin = time.time()
        if begin + longest > deadline:
            print(f"budget: stopped before round {turn.round} of {turn.cell}; run again to go on", flush=True)
            return False
        for server in turn.order(list(alive)):
            start = time.time()
            row = ask(alive[server], turn.cell)
            if row is None:
                kill(alive.pop(server))
                continue
            label, seconds = server.label(turn.cell, turn.round), time.time() - start
            store.add(label | row | {"at": round(start, 1), "seconds": round(seconds, 2)})
        longest = max(longest, time.time() - begin)
    return True


def ask(one: Running, cell: Cell) -> Row | None:
    """One run of a server that is paused before and afterwards; None where it died."""
    resume(one.process.pid)
    try:
        return _hear(one, HANGS_S) if _tell(one, cell) else None
    finally:
        pause(one.process.pid)


def stop(running: Sequence[Running]) -> list[int]:
    """Lets servers shut down; returns their exit codes."""
    for one in running:
        resume(one.process.pid)
        _tell(one, None)
    until = time.time() + STOP_S
    return [finish(one, until) for one in running]


def _tell(one: Running, message: object) -> bool:
    """Whether it could be told."""
    try:
        one.link.send(message)
    except OSError:
        return False
    return True


def _hear(one: Running, limit_s: float = 0.0) -> Row | None:
    try:
        found: Row | None = one.link.recv() if one.link.poll(limit_s) else None
    except (EOFError, OSError):
        return None
    return found


def _left(deadline: float) -> float | None:
    return max(deadline - time.time(), 0.0) if deadline < float("inf") else None
