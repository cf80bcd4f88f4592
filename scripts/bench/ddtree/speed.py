# SPDX-License-Identifier: Apache-2.0
"""The stage `speed`: wall time of a decode step at long contexts, with random weights of a real attention geometry.

Each context is prefilled once and found again in the radix cache. A run asks for STEPS tokens more and takes the
request that started last: from its first token to its last, over the steps it took, all requests decode. A random
drafter is all but never right, so a step gives one token; steps are counted all the same.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..store import Row
from .answers import Answer, ask
from .decode_log import Tail, parse, summary
from .models import VOCABULARY
from .modes import BATCHES, LOG_INTERVAL

CONTEXTS = (1024, 16384, 65536)
STEPS, RUNS = 96, 4
"""Tokens a run, and runs a cell, of which the median is kept."""

WARM_UP, LEARN = 8, 192
"""Tokens before the first run of a cell; of a server that adapts, to the cell's context and batch."""

ONE_CHUNK = 1 << 20
"""Tokens a chunk of the answer: none between the first token and the end."""

SERVER = {
    "load_format": "dummy",
    "max_total_tokens": int(1.1 * max(BATCHES) * sum(CONTEXTS)),
    "mem_fraction_static": 0.7,
    "context_length": max(CONTEXTS) + 4096,
}
"""Room for every context at once."""


class Cell(NamedTuple):
    """A batch of equal contexts."""

    context: int  # tokens of each request
    bs: int


CELLS = [Cell(context, bs) for context in CONTEXTS for bs in BATCHES]


def prompt(context: int, number: int) -> list[int]:
    """Random token ids, the same for every server."""
    return random.Random(f"{context} {number}").choices(range(10, VOCABULARY), k=context)


def step_ms(answers: Sequence[Answer]) -> float:
    """Milliseconds a step while all requests of a batch decode."""
    last = max(answers, key=lambda answer: answer.seconds[0])
    return 1e3 * (last.seconds[-1] - last.seconds[0]) / last.steps


def measure(engine: Any, cell: Cell, log: Tail, warm_up: int = WARM_UP) -> Row:
    """Times a cell.

    Args:
        warm_up: tokens before the first run.

    Returns:
        step_ms: the median of `runs_ms`; raw_tokens_per_step: of the random drafter; scheduler_step_ms, nodes,
        stages_ms and graph: from the server's own log, see decode_log.Summary.
    """
    inputs = [prompt(cell.context, number) for number in range(cell.bs)]
    ask(engine, inputs, warm_up, 0.0, ONE_CHUNK)
    log.read()
    runs = [ask(engine, inputs, STEPS + 1, 0.0, ONE_CHUNK) for _ in range(RUNS)]
    times = [step_ms(answers) for answers in runs]
    every = [answer for answers in runs for answer in answers]
    told = summary(list(parse(log.read())), cell.bs, LOG_INTERVAL)
    return {
        "step_ms": statistics.median(times),
        "runs_ms": [round(time, 4) for time in times],
        "raw_tokens_per_step": sum(answer.new for answer in every) / sum(answer.steps for answer in every),
        "scheduler_step_ms": told.step_ms,
        "nodes": told.nodes,
        "stages_ms": told.stages_ms,
        "graph": told.graph,
    }
