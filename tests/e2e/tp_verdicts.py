# SPDX-License-Identifier: Apache-2.0
"""What two_gpus.py concludes: from outputs and their growth, from ranks' records, from a stopped server's log. Pure."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts")]

from bench.ddtree.acceptance import ratio  # noqa: E402

Row = dict[str, Any]

WITHIN = 0.02
"""Of the acceptance at tp 1."""
LEAST_COMMON = 0.5
"""Share of the tokens that both servers must have written alike for a comparison of acceptance."""
LEAST_TOKENS_A_STEP = 1.2

STOPS = {
    "trees": r"treeverify: the draft trees of step (?P<step>\d+) differ between ranks: "
    r"rank 0: (?P<first>[0-9a-f]{16}); rank 1: (?P<second>[0-9a-f]{16})\.",
    "installation": r"treeverify: patches and kernels differ between ranks: "
    r"rank 0: (?P<first>\S+ patches \S+ kernels \S+); rank 1: (?P<second>\S+ patches \S+ kernels \S+)\.",
}
"""What a server says before it stops, with step and ranks."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two outputs begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def taken(growth: Sequence[int], upto: int) -> tuple[int, int]:
    """(tokens, steps) of the decode steps that ended within the first `upto` tokens; the prefill's token is none."""
    within = [length for length in growth if length <= upto]
    return (within[-1] - 1, len(within)) if within else (0, 0)


def acceptance(ours: Sequence[Row], theirs: Sequence[Row]) -> Row:
    """Tokens a step of one server over another's, request by request.

    Where rounding makes two outputs part, they go on with different texts, whose acceptance differs by chance. What
    decides is the steps before that, of both servers on the same text; the ratio of whole outputs comes with its
    standard error, by bootstrap over the requests.

    Args:
        ours, theirs: rows of the same requests in the same order, each with `output` and `growth`.
    """
    whole: list[Row] = [{"tokens": [], "steps": []} for _ in range(2)]
    alike: list[list[int]] = [[0, 0], [0, 0]]
    shared = 0
    for pair in zip(ours, theirs, strict=True):
        upto = common(pair[0]["output"], pair[1]["output"])
        shared += upto
        for row, all_of_it, before in zip(pair, whole, alike, strict=True):
            all_of_it["tokens"].append(len(row["output"]) - 1)
            all_of_it["steps"].append(len(row["growth"]))
            tokens, steps = taken(row["growth"], upto)
            before[0] += tokens
            before[1] += steps
    rates = [sum(side["tokens"]) / sum(side["steps"]) for side in whole]
    whole_ratio, error = ratio(*whole, draws=300)
    share = shared / sum(len(row["output"]) for row in theirs)
    on_common = None
    if min(steps for _, steps in alike) > 0:
        on_common = (alike[0][0] / alike[0][1]) / (alike[1][0] / alike[1][1])
    near = on_common is not None and abs(on_common - 1) <= WITHIN and abs(whole_ratio - 1) <= WITHIN + 2 * error
    return {
        "tokens_per_step": rates[0], "tokens_per_step_of_tp1": rates[1], "ratio_on_common_text": on_common,
        "common_share": share, "steps_on_common_text": alike[0][1], "ratio": whole_ratio, "standard_error": error,
        "ok": near and share >= LEAST_COMMON and min(rates) >= LEAST_TOKENS_A_STEP,
    }  # fmt: skip


def differing(ranks: Sequence[Sequence[Row]]) -> int:
    """Requests that not every rank ended with the same output in the same steps."""
    tables = [{row["rid"]: (row["output"], row["growth"]) for row in rows} for rows in ranks]
    every = set().union(*tables)
    return sum(len({json.dumps(table.get(rid)) for table in tables}) > 1 for rid in every)


def stop(kind: str, run: Row, log: str) -> Row:
    """Whether a server stopped by itself, and what it said.

    Args:
        kind: a key of STOPS.
        run: `returncode`, None where it had to be ended, and `seconds`.
        log: what it wrote.
    """
    found = re.search(STOPS[kind], log)
    said = found.groupdict() if found else {}
    stopped = run["returncode"] not in (None, 0)
    return {**run, "said": found.group() if found else None, **said,
            "ok": stopped and bool(said) and said["first"] != said["second"]}  # fmt: skip


def about(log: str) -> Row:
    """What a server's log tells of how it ran: kernels, all-reduce, and whether its decode steps were graph replays."""
    kernels = re.search(r"treeverify: TARGET_VERIFY of \S+ \(MLA\) runs on treeverify's (\S+ kernels)", log)
    failed = re.search(r"Setup Custom allreduce failed with [^\n]*", log)
    custom = re.search(r"Custom allreduce( v2)? initialized successfully", log)
    graphs = re.findall(r"Decode batch,.*?cuda graph: (True|False)", log)
    return {
        "kernels": kernels.group(1) if kernels else None,
        "all_reduce": "custom" + (custom.group(1) or "") if custom else failed.group() if failed else "not custom",
        "graph_replays": graphs.count("True"), "without_graph": graphs.count("False"),
    }  # fmt: skip


def attention(rows: Sequence[Row], whole: int, share: int, most: float) -> list[Row]:
    """Times of `share` heads over those of `whole`, for every GPU and batch."""
    times = {(row["gpu"], row["bs"], row["heads"]): row for row in rows}
    found: list[Row] = []
    for gpu, bs in sorted({key[:2] for key in times}):
        pair = [times.get((gpu, bs, heads), {}) for heads in (whole, share)]
        us = [row.get("us") for row in pair]
        part = us[1] / us[0] if us[0] and us[1] else None
        right = part is not None and part <= most and not any(row.get("wrong") for row in pair)
        found.append({"attention": f"{share} heads over {whole}", "gpu": gpu, "bs": bs, "us": us, "ratio": part,
                      "at_most": most, "paths": [row.get("impl") for row in pair],
                      "splits": [row.get("nsplit") for row in pair], "errors": [row.get("error") for row in pair],
                      "ok": right})  # fmt: skip
    return found
