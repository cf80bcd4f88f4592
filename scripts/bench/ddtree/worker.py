# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: measures what the report lacks of it. Started by bench_ddtree.py.

Exit 0 where all is measured, 3 where the deadline came first. Its output, the engine's log in it, goes to --log, which
it reads again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
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
    store = Store(args.out, KEY)
    begin = time.time()
    import sglang

    more = acceptance.SERVER if args.stage == "acceptance" else speed.SERVER
    engine = sglang.Engine(**engine_arguments(mode, args.target, args.draft, args.draft_backend, args.port), **more)
    print(f"{mode.name}: engine started in {time.time() - begin:.0f} s", flush=True)
    try:
        return measure(server, store, engine, args)
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
    return parser.parse_args(argv)


def measure(server: Server, store: Store, engine: Any, args: argparse.Namespace) -> int:
    """Adds the rows that the store lacks; returns the exit code."""
    inputs = acceptance.prompts(args.target) if server.stage == "acceptance" else []
    log, complaints = Tail(args.log), Tail(args.log)
    for label, point in server.wanted(store):
        if time.time() > args.deadline:
            return OUT_OF_TIME
        begin = time.time()
        if server.stage == "acceptance":
            row = acceptance.measure(engine, inputs, point)
        else:
            row = speed.measure(engine, point, log, speed.LEARN if server.mode.adapts else speed.WARM_UP)
        row |= failure(server, row, complaints.read())
        store.add(label | rounded(row) | {"seconds": round(time.time() - begin, 1)})
    return 0


def failure(server: Server, row: Row, log: str) -> Row:
    """`failed`, where the log tells that something else was measured than was meant."""
    if NAN in log:
        return {"failed": "the drafter's log-probabilities hold NaN"}
    if NOT_SAMPLED in log:
        return {"failed": "the chain was verified greedily: sgl_kernel lacks the sampling kernels"}
    if server.stage == "speed" and not row["graph"]:
        return {"failed": "steps ran outside CUDA graphs"}
    return {}


if __name__ == "__main__":
    sys.exit(main())
