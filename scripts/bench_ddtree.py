#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures DDTREE beside DFLASH and no speculation: tokens a step, and what a step costs.

    python3 scripts/bench_ddtree.py --out results/ddtree.json --budget-s 460      # both stages, resuming
    python3 scripts/bench_ddtree.py --out … --stages speed --widths 16,32
    python3 scripts/bench_ddtree.py --out … --modes none,ddtree-16                 # these servers only
    python3 scripts/bench_ddtree.py --plot results/ddtree.json                     # table and picture again, anywhere

`acceptance` serves held-out prompts with the trained models, all servers side by side; `speed` times steps with random
weights of a real geometry: all servers are up, one runs at a time, and each cell is measured with all of them in turn,
several rounds over. A row is kept when it is measured, in OUT with .jsonl for .json; what is there for the same card
and build is not measured again, so a run that was cut off, or whose --budget-s ended, goes on where it was. At the end:
OUT with the gates (the goals, and whether they are met), tables beside it as .md, and a picture as .png where
matplotlib is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

from bench.ddtree import believed, models, show, speed, summary, together  # noqa: E402
from bench.ddtree.modes import CHAIN, NONE, WIDTHS, accepting, adaptive, timed, tree  # noqa: E402
from bench.ddtree.processes import GRACE_S, Running, finish, kill, start  # noqa: E402
from bench.ddtree.rows import KEY, STAGES, Server, build, comparable  # noqa: E402
from bench.ddtree.turns import ROUNDS, wanted  # noqa: E402
from bench.ddtree.worker import OUT_OF_TIME  # noqa: E402
from bench.store import Row, Store  # noqa: E402

TRAINED = ROOT / "tests" / "data" / "tiny_mla"

START_S = {"acceptance": 50, "speed": 100}
"""Servers' start and their first rows: none is started with less of the budget left."""

RESERVE_S = 20
"""Of the budget, for stopping servers and for the report."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit 0 where all asked for is measured, 3 where the budget ended first, 1 after an error."""
    args = arguments(argv)
    if args.plot:
        report = json.loads(args.plot.read_text(encoding="utf-8"))
        if not all(map(comparable, report["rows"])):
            print(f"{args.plot}: steps were timed without rounds, so servers cannot be compared; measure again")
            return 1
        return publish(report, args.plot)
    from treeverify.selftest import environment

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers, sessions of their own, are ended too
    where = environment()
    deadline = time.time() + args.budget_s - RESERVE_S
    code = 0
    for stage in args.stages:
        code = run(stage, args, str(where["card"]), deadline) or code
        if code == OUT_OF_TIME:
            break
    store = Store(args.out, KEY)
    digests = {build(NONE), build(CHAIN)}
    rows = [row for row in store.rows.values()
            if row["card"] == where["card"] and row["build"] in digests and comparable(row)]  # fmt: skip
    widths = sorted({row["n"] for row in rows if row["mode"] == "ddtree"} | set(args.widths))
    table, every = summary.Rows(rows), [NONE, CHAIN, *map(tree, widths), *adaptive(widths)]
    header = {**where, "commit": args.commit, "measured": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    store.write_report(
        {**header, "method": METHOD, "random_weights": {"target": models.TARGET, "draft": models.DRAFT}},
        rows,
        gates=list(summary.gates(table, widths)),
        acceptance=summary.accepted(table, every),
        cells=summary.cells(table, every),
    )
    publish(json.loads(args.out.read_text(encoding="utf-8")), args.out)
    return code


METHOD = {
    "acceptance": "new tokens after the prefill's over spec_verify_ct, held-out prompts, trained tiny model",
    "speed": f"median over rounds of a run of {speed.STEPS} tokens: first to last token of the request that started "
    "last, wall clock, over its spec_verify_ct; random weights, prefix cached, the other servers stopped; tokens/s "
    "composed: batch * greedy tokens a step of `acceptance` / step; ratios: median over rounds of those within a round",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="the report; the rows are kept beside it, as .jsonl")
    what.add_argument("--plot", type=Path, metavar="REPORT", help="only write the table and the picture of a report")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="nodes of the trees; default: %(default)s")
    parser.add_argument("--modes", help="only these servers, such as none,dflash-8,ddtree-16; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each cell in `speed`; default: %(default)s")
    parser.add_argument("--target", type=Path, default=TRAINED / "target", help="trained; default: the kit's")
    parser.add_argument("--draft", type=Path, default=TRAINED / "draft", help="its DFlash drafter; default: the kit's")
    parser.add_argument("--draft-backend", default="flashinfer", choices=("flashinfer", "triton"),
                        help="attention of the drafter in `speed`; default: %(default)s")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop cleanly before so many seconds")
    parser.add_argument("--port", type=int, default=33000, help="first of the servers' ports; default: %(default)s")
    parser.add_argument("--logs", type=Path, help="folder of the servers' logs; default: beside OUT")
    parser.add_argument(
        "--commit", default=os.environ.get("TREEVERIFY_COMMIT", "unknown"), help="recorded in the results"
    )
    args = parser.parse_args(argv)
    args.stages = args.stages.split(",")
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"--stages: {', '.join(unknown)} unknown; there are {', '.join(STAGES)}")
    try:
        args.widths = list(dict.fromkeys(map(int, args.widths.split(","))))
    except ValueError:
        parser.error(f"--widths: {args.widths} is not a list of numbers such as 16,32")
    if narrow := [width for width in args.widths if width < CHAIN.width]:
        parser.error(f"--widths: {narrow[0]} is less than the drafter's block of {CHAIN.width}")
    args.modes = args.modes.split(",") if args.modes else []
    known = [mode.name for mode in timed(args.widths)]
    if unknown := [mode for mode in args.modes if mode not in known]:
        parser.error(f"--modes: {', '.join(unknown)} unknown; there are {', '.join(known)}")
    if args.out:
        args.logs = args.logs or args.out.parent / "logs-ddtree"
    return args


def run(stage: str, args: argparse.Namespace, card: str, deadline: float) -> int:
    """Measures what the report lacks of a stage.

    Args:
        deadline: seconds since the epoch.
    """
    store = Store(args.out, KEY)
    modes = accepting(args.widths) if stage == "acceptance" else timed(args.widths)
    modes = [mode for mode in modes if mode.name in args.modes or not args.modes]
    backend = "triton" if stage == "acceptance" else args.draft_backend  # in triton's, FlashInfer need not compile
    servers = [Server(stage, mode, backend, card, build(mode)) for mode in modes]
    told = {server: believed.environment(server, store.rows.values()) for server in servers}
    for server in [server for server in servers if told[server] is None]:
        print(f"{server.mode.name}, {stage}: not measured, it needs the widths' acceptance; run that stage", flush=True)
        servers.remove(server)
    turns = wanted(servers, store, args.rounds) if stage == "speed" else []
    servers = [server for server in servers if turns or stage == "acceptance" and any(server.wanted(store))]
    if not servers:
        return 0
    if time.time() + START_S[stage] > deadline:
        print(f"budget: stopped before {stage}, which starts in {START_S[stage]} s; run again to go on", flush=True)
        return OUT_OF_TIME
    trained = (args.target.resolve(), args.draft.resolve())
    folders = trained if stage == "acceptance" else models.write((args.logs / "random_weights").resolve())
    running: list[Running] = []
    try:
        for place, server in enumerate(servers):
            running.append(start(server, args, folders, place, deadline, told[server] or {}))
        if stage == "speed":
            return together.measure(running, turns, store, deadline)
        codes = [finish(one, deadline + GRACE_S) for one in running]
    finally:
        for one in running:
            if one.process.returncode is None:
                kill(one)
    return OUT_OF_TIME if OUT_OF_TIME in codes and not set(codes) - {0, OUT_OF_TIME} else int(any(codes))


def publish(report: Row, path: Path) -> int:
    """Writes the table and the picture beside a report, prints table and gates."""
    text = show.markdown(report)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    if show.draw(report, path.with_suffix(".png")) is None:
        print(f"no picture, matplotlib is missing here: --plot {path.name} draws it elsewhere")
    print(text, show.gate_lines(report["gates"]), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
