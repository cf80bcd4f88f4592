# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, started by bench_ddtree.py.

For the stage `acceptance` it measures what the report lacks of it: exit 0 where all is measured, 3 where the deadline
came first. For `speed` it is asked for one run after the other. Its output, the engine's log in it, goes to --log,
which it reads again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..store import Row, Store, rounded
from . import acceptance, speed
from .decode_log import NAN, NOT_SAMPLED, Tail
from .modes import Mode, engine_arguments
from .rows import KEY, STAGES, Server

OUT_OF_TIME = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the engine, measures, and stops it."""
    args = arguments(argv)
    mode = Mode(args.algorithm, args.width)
    server = Server(args.stage, mode, args.draft_backend, args.card, args.build)
    begin = time.time()
    import sglang

    more = acceptance.SERVER if args.stage == "acceptance" else speed.SERVER
    engine = sglang.Engine(**engine_arguments(mode, args.target, args.draft, args.draft_backend, args.port), **more)
    print(f"{mode.name}: engine started in {time.time() - begin:.0f} s", flush=True)
    try:
        if args.stage == "acceptance":
            return measure(server, Store(args.out, KEY), engine, args)
        return serve(server, engine, Connection(args.link), args.log)
    finally:
        engine.shutdown()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--algorithm", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--draft-backend", required=True)
    parser.add_argument("--card", required=True)
    parser.add_argument("--build", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the report; rows are added to its journal")
    parser.add_argument("--log", type=Path, required=True, help="where this process's output goes")
    parser.add_argument("--deadline", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--link", type=int, help="file descriptor on which `speed` is asked for runs")
    return parser.parse_args(argv)


def measure(server: Server, store: Store, engine: Any, args: argparse.Namespace) -> int:
    """Adds the rows that the store lacks; returns the exit code."""
    inputs, complaints = acceptance.prompts(args.target), Tail(args.log)
    for label, temperature in server.wanted(store):
        if time.time() > args.deadline:
            return OUT_OF_TIME
        begin = time.time()
        row = acceptance.measure(engine, inputs, temperature)
        row |= failure(server, row, complaints.read())
        store.add(label | rounded(row) | {"seconds": round(time.time() - begin, 1)})
    return 0


def serve(server: Server, engine: Any, link: Connection[Any, Any], path: Path) -> int:
    """Is told the cells that will come, says when it is ready, and answers each with its row; None ends it.

    Args:
        path: of the log.
    """
    log, complaints = Tail(path), Tail(path)
    speed.prepare(engine, link.recv())
    link.send({})
    while (cell := link.recv()) is not None:
        row = speed.measure(engine, cell, log, speed.LEARN if server.mode.adapts else speed.WARM_UP)
        link.send(rounded(row | failure(server, row, complaints.read())))
    return 0


def failure(server: Server, row: Row, log: str) -> Row:
    """`failed`, where the log tells that something else was measured than was meant."""
    if NAN in log:
        return {"failed": "the drafter's log-probabilities hold NaN"}
    if NOT_SAMPLED in log:
        return {"failed": "the chain was verified greedily: sgl_kernel lacks the sampling kernels"}
    if server.stage == "speed" and not row["graph"]:
        return {"failed": "steps ran outside CUDA graphs"}
    if server.stage == "speed" and row["recomputed"] > 1:
        return {"failed": f"the cache lacked {row['recomputed']} tokens of a prompt: the pool is too small"}
    return {}


if __name__ == "__main__":
    sys.exit(main())
