# SPDX-License-Identifier: Apache-2.0
"""Paused servers take no core: real processes that never sleep, one of them in a session of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from bench.ddtree.pausing import pause, resume, tree

SPIN = """
import subprocess, sys
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], start_new_session=depth == 1)
while True:
    pass
"""


@pytest.fixture
def root() -> Iterator[int]:
    """A process, its child, and that one's in another session; all spin."""
    process = subprocess.Popen([sys.executable, "-c", SPIN, "2", SPIN])
    try:
        until(lambda: len(tree(process.pid)) == 3 and all(used(one) > 0 for one in tree(process.pid)))
        yield process.pid
    finally:
        for one in tree(process.pid):
            one.kill()
        process.wait()


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def used(process: psutil.Process) -> float:
    """Seconds of a core."""
    times = process.cpu_times()
    return float(times.user + times.system)


def test_a_paused_tree_takes_no_core_and_goes_on(root):
    pause(root)
    every = tree(root)
    assert [one.status() for one in every] == [psutil.STATUS_STOPPED] * 3
    before = [used(one) for one in every]
    time.sleep(0.3)
    assert [used(one) for one in every] == before
    resume(root)
    until(lambda: all(used(one) > spent for one, spent in zip(every, before, strict=True)))


def test_pausing_twice_is_pausing_once(root):
    pause(root)
    pause(root)
    resume(root)
    assert all(one.status() != psutil.STATUS_STOPPED for one in tree(root))


def test_what_is_gone_is_left_alone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    pause(process.pid)
    resume(process.pid)
    assert tree(process.pid) == []
