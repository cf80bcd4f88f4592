# SPDX-License-Identifier: Apache-2.0
"""The processes that serve: started, waited for, and ended with all that they started."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from .rows import Server
from .worker import OUT_OF_TIME

SCRIPTS = Path(__file__).resolve().parents[2]

GRACE_S = 30
"""Past the deadline, for a row that is being measured; then the server is killed."""

PORTS = 200
"""A server may use."""


class Running(NamedTuple):
    """A server that is being measured."""

    server: Server
    process: subprocess.Popen[bytes]
    log: Path
    link: Connection[Any, Any]
    """Of the stage `speed`: see worker.serve."""


def start(
    server: Server, args: argparse.Namespace, folders: tuple[Path, Path], place: int, deadline: float,
    more: Mapping[str, str],
) -> Running:  # fmt: skip
    """Starts the process that serves and measures one mode.

    Args:
        args: bench_ddtree.py's.
        folders: of target and drafter.
        place: number of this server among those that run.
        deadline: seconds since the epoch.
        more: of its environment.
    """
    args.logs.mkdir(parents=True, exist_ok=True)
    log = args.logs / f"{server.stage}-{server.mode.name}.log"
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "bench.ddtree.worker", "--stage", server.stage, "--algorithm",
               server.mode.algorithm, "--width", str(server.mode.width), "--target", str(folders[0]), "--draft",
               str(folders[1]), "--draft-backend", server.draft_backend, "--card", server.card, "--build",
               server.build, "--port", str(args.port + PORTS * place), "--out", str(args.out), "--log", str(log),
               "--deadline", str(deadline), "--link", str(theirs.fileno())]  # fmt: skip
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log, "ab") as output, theirs:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more},
        )  # fmt: skip
    return Running(server, process, log, ours)


def finish(running: Running, until: float) -> int:
    """Waits for a server's end, or kills it where it hangs, and tells how it went; returns its exit code.

    Args:
        until: seconds since the epoch.
    """
    try:
        code = running.process.wait(max(until - time.time(), 1) if until < float("inf") else None)
    except subprocess.TimeoutExpired:
        code = OUT_OF_TIME
    kill(running)
    print(f"{running.server.stage}, {running.server.mode.name}: exit {code}", flush=True)
    if code not in (0, OUT_OF_TIME):
        print(*running.log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
    return code


def kill(running: Running) -> None:
    """Ends a server and what its engine left behind, which would hold memory."""
    try:
        os.killpg(running.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    running.process.wait()
    running.link.close()
