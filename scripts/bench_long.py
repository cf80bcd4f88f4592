#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a decode step of one request of 100k tokens: treeverify's trees, stock Triton's, stock FlashInfer's chain.

    python3 scripts/bench_long.py --out results/long.json --budget-s 460

One server after the other, alone on the GPU; a row is kept in OUT with .jsonl for .json when it is measured, and a run
that was cut off, or whose budget ended (exit 3), goes on with the servers that have none for this card and build.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench import long  # noqa: E402
from bench.ddtree import models  # noqa: E402
from bench.ddtree.decode_log import Tail  # noqa: E402
from bench.ddtree.rows import build  # noqa: E402
from bench.ddtree.show import gate_lines  # noqa: E402
from bench.store import Row, Store, rounded  # noqa: E402

OUT_OF_TIME = 3
SERVER_S = 130
"""A server's start, its prefill and its runs: none is started with less of the budget left."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 0 where all is measured, 3 where the budget ended first, 1 after an error."""
    args = arguments(argv)
    if args.serve:
        return serve(args)
    from bench.ddtree.modes import tree
    from treeverify.selftest import environment

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server, a session of its own, is ended too
    where = environment()
    label = {"card": where["card"], "build": build(tree(long.WIDTH))}
    code = run(args, label, time.time() + args.budget_s)
    rows = [row for row in Store(args.out, long.KEY).rows.values() if all(row[key] == label[key] for key in label)]
    header = {**where, "commit": args.commit, "measured": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    gates = list(long.gates(rows))
    Store(args.out, long.KEY).write_report({**header, "context": long.CONTEXT, "width": long.WIDTH}, rows, gates=gates)
    print(*long.table(rows), gate_lines(gates), sep="\n", flush=True)
    return code


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the report; the rows are kept beside it, as .jsonl")
    parser.add_argument("--servers", default=",".join(long.SERVERS), help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="runs of a server, of which the median counts")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no server that might end later")
    parser.add_argument("--port", type=int, default=37000)
    parser.add_argument("--logs", type=Path, help="folder of logs and configs; default: beside OUT")
    parser.add_argument("--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"))
    parser.add_argument("--serve", choices=sorted(long.SERVERS), help="used by the script itself")
    parser.add_argument("--label", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.servers = args.servers.split(",")
    if unknown := [name for name in args.servers if name not in long.SERVERS]:
        parser.error(f"--servers: {', '.join(unknown)} unknown; there are {', '.join(long.SERVERS)}")
    args.logs = args.logs or args.out.parent / "logs-long"
    return args


def run(args: argparse.Namespace, label: Row, deadline: float) -> int:
    """Measures the servers that have no row."""
    failed = False
    for name in args.servers:
        if Store(args.out, long.KEY).done({**label, "server": name}):
            continue
        if time.time() + SERVER_S > deadline:
            print(f"budget: stopped before {name}; run again to go on", flush=True)
            return OUT_OF_TIME
        failed = not _one(args, name, label, deadline) or failed
    return int(failed)


def _one(args: argparse.Namespace, name: str, label: Row, deadline: float) -> bool:
    """Starts a server in a process of its own, waits for its row, and ends what it left behind."""
    args.logs.mkdir(parents=True, exist_ok=True)
    log = args.logs / f"{name}.log"
    command = [sys.executable, __file__, "--serve", name, "--label", json.dumps(label), "--out", str(args.out),
               "--runs", str(args.runs), "--port", str(args.port), "--logs", str(args.logs)]  # fmt: skip
    told = {**os.environ, "PYTHONUNBUFFERED": "1", **long.SERVERS[name].environment}
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=told)
    try:
        code = process.wait(max(deadline - time.time(), 1) if deadline < float("inf") else None)
    except subprocess.TimeoutExpired:
        code = OUT_OF_TIME
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    print(f"{name}: exit {code}", flush=True)
    if code:
        print(*log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
    return code == 0


def serve(args: argparse.Namespace) -> int:
    """What the server's process does: one row."""
    server, begin = long.SERVERS[args.serve], time.time()
    target, draft = models.write((args.logs / "random_weights").resolve(), block=long.WIDTH)
    import sglang

    engine: Any = sglang.Engine(**long.arguments(server, target, draft, args.port))
    try:
        row = long.measure(engine, Tail(args.logs / f"{args.serve}.log"), args.runs)
    finally:
        engine.shutdown()
    row = {"server": args.serve, **args.label, **rounded(row), "seconds": round(time.time() - begin, 1)}
    Store(args.out, long.KEY).add(row)
    return int("failed" in row)


if __name__ == "__main__":
    sys.exit(main())
