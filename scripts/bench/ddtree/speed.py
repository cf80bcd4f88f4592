# SPDX-License-Identifier: Apache-2.0
"""The stage `speed`: wall time of a decode step at long contexts, with random weights of a real attention geometry.

Each context is prefilled once and found again in the radix cache. A run asks for STEPS tokens more and takes the
request that started last: from its first token to its last, over the steps it took, all requests decode. A random
drafter is all but never right, so a step gives one token; steps are counted all the same.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..store import Row
from .answers import Answer, ask
from .decode_log import Tail, parse, summary
from .models import VOCABULARY
from .modes import BATCHES, LOG_INTERVAL

CONTEXTS = (1024, 16384, 65536)
STEPS = 2 * LOG_INTERVAL + 8
"""Tokens of a run: one line of the log at least tells of its steps alone, though a draft be accepted now and then."""

WARM_UP, LEARN = 8, 192
"""Tokens before a run; of a server that adapts, to the cell's context and batch."""

SETTLE_S = 0.05
"""After a run: a step that the scheduler launched ahead is over then, and its last line is written."""

ONE_CHUNK = 1 << 20
"""Tokens a chunk of the answer: none between the first token and the end."""

SERVER = {
    "load_format": "dummy",
    "max_total_tokens": int(1.1 * max(BATCHES) * sum(CONTEXTS)),
    "mem_fraction_static": 0.95,
    "context_length": max(CONTEXTS) + 4096,
}
"""Room for every context at once, 730 000 tokens. It bounds a server's memory: 7 GB of the target's KV and 3 GB of the
drafter's, beside 2 GB of weights. SGLang's fraction is of what was free when a server started, less what others took
since: near 1, it leaves room for the tokens asked for, whichever server comes last."""


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


def prepare(engine: Any, cells: Iterable[Cell]) -> None:
    """Prefills the contexts of cells, and lets each batch size decode."""
    for cell in sorted(cells, reverse=True):
        ask(engine, _inputs(cell), WARM_UP, 0.0, ONE_CHUNK)


def measure(engine: Any, cell: Cell, log: Tail, warm_up: int = WARM_UP) -> Row:
    """Times one run of a cell.

    Args:
        warm_up: tokens before it.

    Returns:
        step_ms; raw_tokens_per_step: of the random drafter; recomputed: tokens of a prompt that were not in the cache,
        at most (the last never is); scheduler_step_ms, nodes, stages_ms and graph: from the server's own log,
        see decode_log.Summary.
    """
    inputs = _inputs(cell)
    ask(engine, inputs, warm_up, 0.0, ONE_CHUNK)
    log.read()
    answers = ask(engine, inputs, STEPS + 1, 0.0, ONE_CHUNK)
    time.sleep(SETTLE_S)
    told = summary(list(parse(log.read())), cell.bs)
    return {
        "step_ms": step_ms(answers),
        "raw_tokens_per_step": sum(answer.new for answer in answers) / sum(answer.steps for answer in answers),
        "recomputed": max(cell.context - answer.meta["cached_tokens"] for answer in answers),
        "scheduler_step_ms": told.step_ms,
        "nodes": told.nodes,
        "stages_ms": told.stages_ms,
        "graph": told.graph,
    }


@functools.cache
def _inputs(cell: Cell) -> list[list[int]]:
    return [prompt(cell.context, number) for number in range(cell.bs)]
