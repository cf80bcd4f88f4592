# SPDX-License-Identifier: Apache-2.0
"""Scores the soak's greedy outputs with the target alone. Started by soak.py, once for each target."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "scripts")]

import soak_traffic as traffic  # noqa: E402
from judge import FACTOR, deficits, measure_gap, score  # noqa: E402
from modes import engine_arguments  # noqa: E402
from soak import SERVERS, Folders  # noqa: E402

GAP = 48, 300_000
"""Prompts on which the target's own rounding is measured, at most, and their tokens, about."""

SCORED = 600, 1_000_000
"""The same of outputs that are scored, of a server."""

BATCH = 8
ROOM: dict[str, Any] = {"max_total_tokens": (BATCH + 1) * (traffic.LONGEST + 4096),
                        "context_length": traffic.LONGEST + 4096, "mem_fraction_static": 0.8}  # fmt: skip


Pair = tuple[list[int], list[int]]
"""Prompt and output."""


def spread(pairs: list[Pair], limit: tuple[int, int]) -> list[Pair]:
    """Some of the pairs, evenly from first to last: as many as both limits allow, on prompts and on their tokens."""
    count, tokens = limit
    total = sum(len(prompt) for prompt, _ in pairs)
    count = min(len(pairs), count, max(1, len(pairs) * tokens // max(total, 1)))
    return [pairs[i * len(pairs) // count] for i in range(count)]


def answers(path: Path, text: traffic.Text, lengths: traffic.Lengths) -> list[Pair]:
    """The answers that are scored; the last output where a request was sent twice."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    outputs = {row["rid"]: row["output"] for row in rows if row["output"]}
    pairs = [(traffic.draw(text, lengths, rid).prompt, output) for rid, output in outputs.items()]
    return sorted(spread(pairs, SCORED), key=lambda pair: len(pair[0]))  # a batch's prompts are of like lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    import sglang

    folders, names = Folders(args.target, args.draft, args.work), args.servers.split(",")
    first = SERVERS[names[0]]
    more = {} if first.trained else {"load_format": "dummy"}
    target, _ = folders.models(first)
    engine = sglang.Engine(**engine_arguments(target, port=args.port, nccl_port=args.port + 50, **ROOM, **more))
    text = traffic.Text.held_out(folders.target)
    pairs = {name: answers(folders.answers(name), text, SERVERS[name].lengths) for name in names}
    gap, _ = measure_gap(engine, [prompt for prompt, _ in spread(pairs[names[0]], GAP)])
    margin = FACTOR * max(gap.values())
    for name in names:
        misses = deficits(score(engine, pairs[name], BATCH))
        folders.scores(name).write_text(json.dumps({
            "judged_outputs": len(pairs[name]), "judged_tokens": len(misses), "worst_deficit": max(misses),
            "mean_deficit": sum(misses) / len(misses), "beyond_margin": sum(miss > margin for miss in misses),
            "margin": margin, "gap": gap,
        }))  # fmt: skip
        print(f"{name}: {len(misses)} tokens scored", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
