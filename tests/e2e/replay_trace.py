# SPDX-License-Identifier: Apache-2.0
"""What a served verify step launches and waits for, from the profiles that serve.py left.

    python3 tests/e2e/replay_trace.py --outputs DIR --out OUT/replay.json

A verify step of the target is a call of CudaGraphRunner.replay around treeverify's metadata call. Within it nothing may
wait for the GPU, and its graph must hold our kernels. All other waits belong to SGLang's workers; they are listed with
the function they are made in.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import report  # noqa: E402
from gpu_trace import Event, Trace, inside  # noqa: E402
from modes import chosen  # noqa: E402


def steps(trace: Trace) -> list[Event]:
    """The target's verify steps: calls of the graph runner's replay around our metadata call."""
    metadata = trace.regions(
        lambda name: "treeverify/attention/verifier.py" in name and name.endswith(": replay")
    )
    replays = trace.regions(lambda name: "cuda_graph_runner.py" in name and name.endswith(": replay"))
    return [replay for replay in replays if any(inside(m, replay) for m in metadata)]


def describe(mode: str, trace: Trace) -> dict[str, Any]:
    """One row: the steps found, kernels of the first, waits inside all of them, and who else waits."""
    found = steps(trace)
    waits = trace.waits()
    within = [w for w in waits if any(inside(w, step) for step in found)]
    first = found[len(found) // 2] if found else None
    replayed = dict(trace.replayed_in(first)) if first else {}
    launched = dict(trace.launched_in(first)) if first else {}
    ours = sum(count for name, count in replayed.items() if name.startswith("tv_"))
    others = trace.stacks(w for w in waits if w not in set(within))
    return {
        "mode": mode, "steps": len(found), "our_kernels_in_replay": ours, "replayed": replayed,
        "launched_before_replay": {name: n for name, n in launched.items() if name not in replayed},
        "waits_in_steps": [w.name for w in within], "waits_of_workers": dict(others.most_common(40)),
        "ok": bool(found) and ours > 0 and not within and any("prep" in name for name in launched),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--outputs", type=Path, required=True, help="folder that serve.py wrote to")
    parser.add_argument("--out", type=Path, required=True, help="results file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mode in (name for name, mode in chosen().items() if mode.trace):
        files = sorted((args.outputs / f"trace-{mode}").glob("*.json*"))
        rows.append(describe(mode, Trace(files[-1])) if files else {"mode": mode, "ok": False, "missing": "no trace"})
    report.write(args.out, rows)
    print(json.dumps({row["mode"]: row.get("waits_of_workers") for row in rows}, indent=1))
    report.fail_unless_ok(args.out)


if __name__ == "__main__":
    main()
