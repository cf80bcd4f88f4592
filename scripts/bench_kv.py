#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times kv_move, and what contiguous slots are worth to a verify step.

    python3 scripts/bench_kv.py --out results/kv.json

Three stages: long lists of moves over all layers, beside the rate of a plain copy in the same run; a step's accepted
paths; one layer's verify attention on scattered, paged and contiguous slots, from which follows after how many steps a
defragmentation has paid. Medians of CUDA-graph replays, the L2 flushed before each. Rows are kept in OUT with .jsonl
for .json as they are measured; what is there for the same card and build is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench.jobs import Job  # noqa: E402
from bench.kv import KEY, LAYOUTS, Move, MoveBench, Pools, copy_gbs, gates, payback  # noqa: E402
from bench.measure import Bench, library_build  # noqa: E402
from bench.problems import COMMON_POOL, SLOTS, Problems  # noqa: E402
from bench.shapes import Shape  # noqa: E402
from bench.store import Row, Store, rounded  # noqa: E402
from bench.timer import GraphTimer, Timer, WallClock  # noqa: E402
from treeverify.attention import paths as verify_paths  # noqa: E402
from treeverify.selftest import environment  # noqa: E402

STAGES = ("move", "step", "verify")
CONTEXTS = (32_768, 65_536, 131_072, 200_000)
ROWS = (256, 1024, 4096, 16_384, *CONTEXTS)
BATCHES = (1, 8, 32)
HEADS, NODES = 8, 16
RESERVE_S = 5


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 0 where all asked for is measured, 3 where the budget ended first."""
    args = arguments(argv)
    started, cuda = time.monotonic(), args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timer: Timer = GraphTimer() if cuda else WallClock()
    store = Store(args.out, KEY)
    label = {"card": torch.cuda.get_device_name() if cuda else "cpu", "build": library_build() if cuda else "cpu"}
    copy = copy_gbs(timer, device)
    code = 0
    for name, run in planned(args, timer, device, copy, label, store):
        if time.monotonic() > started + args.budget_s - RESERVE_S:
            print(f"budget: stopped before {name}; run again to go on", flush=True)
            code = 3
            break
        row = run()
        store.add(row)
        print(json.dumps(row), flush=True)
    rows = [row for row in store.rows.values() if all(row[name] == value for name, value in label.items())]
    where = environment() if cuda else {"card": "cpu", "torch": torch.__version__}
    header = {
        **where, "commit": args.commit, "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **rounded({"copy_gbs": copy, "copy_gbs_at_the_end": copy_gbs(timer, device)}),
    }  # fmt: skip
    judged, worth = gates(rows), payback(rows, args.layers)
    store.write_report(header, rows, gates=judged, payback=worth)
    for line in (*judged, *worth):
        print(json.dumps(line), flush=True)
    return code


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the report; the rows are kept beside it, as .jsonl")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=61, help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="moves of a long list")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens, for the stage verify")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop cleanly before so many seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, its times are void")
    parser.add_argument(
        "--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"), help="recorded in the results"
    )
    args = parser.parse_args(argv)
    args.stages = [part for part in args.stages.split(",") if part]
    if unknown := [part for part in args.stages if part not in STAGES]:
        parser.error(f"--stages: {', '.join(unknown)} unknown; there are {', '.join(STAGES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible to PyTorch; --device cpu makes a dry run")
    return args


def planned(
    args: argparse.Namespace, timer: Timer, device: torch.device, copy: float, label: dict[str, str], store: Store
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What is asked for and not there yet, each with its name; pools are made when they are needed."""
    moves = [Move(rows, slots) for rows in args.rows for slots in LAYOUTS] if "move" in args.stages else []
    moves += [Move(0, "paths", bs) for bs in BATCHES] if "step" in args.stages else []
    if moves:
        slots = max(3 * max(args.rows), 64 * max(BATCHES))
        bench = MoveBench(Pools.of(args.layers, slots, device), timer, copy, label)
        for move in moves:
            if not store.done(bench.label(move)):
                yield str(move), lambda move=move: bench(move)  # type: ignore[misc]
        del bench
    if "verify" in args.stages:
        pool = COMMON_POOL if device.type == "cuda" else 2 * max(args.contexts) + 256
        steps, impl = Bench(Problems(pool, device), timer, {}, label["card"]), verify_paths.target(device).name
        for kv in args.contexts:
            for slots_of in SLOTS:
                named = {
                    "what": "verify", "bs": 1, "kv": kv, "slots": slots_of, "heads": HEADS, "n": NODES, **label
                }  # fmt: skip
                if not store.done(named):
                    job = Job(impl, Shape(1, HEADS, NODES, kv), slots_of)
                    yield f"verify {kv} {slots_of}", lambda job=job, named=named: {**steps(job), **named}  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main())
