#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times mla_verify, each path of it, beside the kernels SGLang has.

    python3 scripts/bench_verify.py --out results/verify.json                      # everything, resuming
    python3 scripts/bench_verify.py --out … --stages shapes --shapes 1,8,9,200000 --peers triton,fa2

Each number is the median of CUDA-graph replays with the L2 flushed before each. Ceilings (read, copy, matrix product,
bare mma.sync) are measured first, in the same process. A row is kept when it is measured, in OUT with .jsonl for .json;
what is there for the same card and build is not measured again, so a run that was cut off, or whose --budget-s ended,
goes on where it was. The report OUT is written at the end, with the gates: the goals, and whether they are met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench import ceilings, gates, plots  # noqa: E402
from bench.jobs import STAGES, Job, jobs  # noqa: E402
from bench.measure import PATHS, Bench, largest_workspace  # noqa: E402
from bench.peers import PEERS  # noqa: E402
from bench.problems import Problems  # noqa: E402
from bench.shapes import LARGEST, Shape  # noqa: E402
from bench.store import Row, Store, rounded  # noqa: E402
from bench.timer import GraphTimer, Timer, WallClock  # noqa: E402
from treeverify.attention import paths as verify_paths  # noqa: E402
from treeverify.selftest import environment  # noqa: E402

CEILINGS = "ceilings"
"""`impl` of the journal's rows of them, one a run."""

RESERVE_S = 8
"""Of the budget, for a last row and the report."""


class Fatal(Exception):
    """The card is lost to this process."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 0 where all asked for is measured, 3 where the budget ended first, 1 after an error."""
    args = arguments(argv)
    started = time.monotonic()
    store = Store(args.out)
    cuda = args.device == "cuda"
    card = torch.cuda.get_device_name() if cuda else "cpu"
    timer: Timer = GraphTimer(cap_ms=args.row_cap_ms) if cuda else WallClock()
    limits = ceilings.measure(timer) if cuda else {}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    print(json.dumps(limits), flush=True)
    bench = Bench(Problems(args.pool, args.device), timer, limits, card)
    store.add({"impl": CEILINGS, "batch": now, "card": card, **rounded(limits)})
    code = 0
    try:
        for count, row in enumerate(run(store, bench, list(planned(args)), started + args.budget_s - RESERVE_S)):
            if row["stage"] != "sweep" or "failed" in row or "wrong" in row:
                print(json.dumps({k: v for k, v in row.items() if k not in ("card", "build", "stage")}), flush=True)
            elif count % 250 == 0:
                print(f"{count} rows, {time.monotonic() - started:.0f} s", flush=True)
    except TimeoutError as e:
        print(e, flush=True)
        code = 3
    except Fatal as e:
        print(f"bench_verify: {e}", file=sys.stderr, flush=True)
        code = 1
    report(store, bench, args, {"measured": now, "ceilings": rounded(limits)})
    return code


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the report; the rows are kept beside it, as .jsonl")
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, metavar="BS,H,N,KV", help="for the stage `shapes`")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s; with --shapes: shapes")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, may be empty; default: %(default)s")
    parser.add_argument("--paths", help="ours: portable, narrow, hopper, each also as …_fp8; default: without")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop cleanly before so many seconds")
    parser.add_argument("--row-cap-ms", type=float, default=400, help="do not time what takes longer; default: 400")
    parser.add_argument("--pool", type=int, help="slots of the KV pool; default: what the largest batch needs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, its times are void")
    parser.add_argument("--no-plots", action="store_true", help="no PNG files")
    parser.add_argument(
        "--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"), help="recorded in the results"
    )
    args = parser.parse_args(argv)
    if args.shapes and args.stages == ",".join(STAGES):
        args.stages = "shapes"
    for name, known in (("stages", STAGES), ("peers", tuple(PEERS)), ("paths", tuple(PATHS))):
        chosen = [part for part in (getattr(args, name) or "").split(",") if part]
        if unknown := [part for part in chosen if part not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} unknown; there are {', '.join(known)}")
        setattr(args, name, chosen)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible to PyTorch; --device cpu makes a dry run")
    args.paths = args.paths or [target.name for target in verify_paths.testable(_device(args))]
    args.pool = args.pool or _pool_slots(args)
    return args


def _device(args: argparse.Namespace) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")


def _pool_slots(args: argparse.Namespace) -> int:
    """Room for the largest batch, in whole pages."""
    shapes = [job.shape for _, job in planned(args)] if args.stages == ["shapes"] else [LARGEST]
    return max(shape.bs * (shape.kv + shape.n + 64) for shape in shapes)


def planned(args: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Every measurement asked for, with its stage, in order."""
    for stage in args.stages:
        yield from ((stage, job) for job in jobs(stage, args.paths, args.peers, args.shapes))


def run(store: Store, bench: Bench, wanted: Sequence[tuple[str, Job]], deadline: float) -> Iterator[Row]:
    """Measures what the store lacks; yields each row it adds, with its stage.

    Raises:
        TimeoutError: the deadline, by time.monotonic(), came first.
        Fatal: the card no longer answers.
    """
    for at, (stage, job) in enumerate(wanted):
        if store.done(bench.label(job)):
            continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"budget: stopped before measurement {at + 1} of {len(wanted)}; run again to go on")
        row = bench(job)
        store.add(row)
        yield {"stage": stage, **row}
        if "failed" in row:
            _still_there(job, row["failed"])


def _still_there(job: Job, why: str) -> None:
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            raise Fatal(f"{job} broke the card's context ({why}): {e}; the rows so far are kept") from e


def report(store: Store, bench: Bench, args: argparse.Namespace, header: Row) -> None:
    """Writes the report and the plots, prints the gates."""
    rows = [row for row in store.rows.values() if row["impl"] != CEILINGS and bench.is_current(row)]
    header["ceilings_of_all_runs"] = [row for row in store.rows.values() if row["impl"] == CEILINGS]
    ours = [path for path in PATHS if any(row["impl"] == path for row in rows)]
    peers = [peer for peer in PEERS if any(row["impl"] == peer for row in rows)]
    find = gates.finder(rows)
    result = list(gates.gates(rows, find, {path: largest_workspace(_device(args), path) for path in ours}))
    shapes, means = gates.table(find, ours, peers), gates.means(find, ours, peers)
    where = environment() if args.device == "cuda" else {"card": "cpu", "torch": torch.__version__}
    store.write_report(
        {**where, "commit": args.commit, **header},
        rows,
        gates=result,
        means=means,
        shapes=shapes,
        growth=gates.growth(find, ours),
    )
    if not args.no_plots:
        plots.draw(find, ours, peers, bench.card, args.out)
    print(gates.table_text(shapes, [*ours, *peers]))
    for row in means:
        print("geometric mean of {shapes} baselines, {path} / {peer}: {mean}".format(**row))
    print(gates.text(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
