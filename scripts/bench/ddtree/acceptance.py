# SPDX-License-Identifier: Apache-2.0
"""The stage `acceptance`: tokens a step of the trained target and drafter, within the context they were trained on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..store import Row
from .answers import Answer, ask
from .modes import BATCHES

LENGTHS, PER_LENGTH, NEW_TOKENS = (150, 500, 1000), 16, 256
"""Held-out prompts; drafts were trained on 1024 tokens and 512 more, see kit/train.py."""

TEMPERATURES = (0.0, 1.0)
REPEATS = {0.0: 1, 1.0: 3}
"""Answers to each prompt."""

SERVER = {"disable_radix_cache": True, "max_total_tokens": 65536, "mem_fraction_static": 0.5}
"""Small pools, so that the servers fit on one GPU side by side: nothing is timed."""


def prompts(target: Path) -> list[list[int]]:
    """Token ids cut from the standard library's held-out files, lengths in turn."""
    from kit import bpe, corpus
    from kit.prompts import make

    tokenizer, files = bpe.load(target), corpus.sources(None)
    made = [make(tokenizer, files, length, PER_LENGTH) for length in LENGTHS]
    return [prompt.input_ids for column in zip(*made, strict=True) for prompt in column]


def measure(engine: Any, inputs: Sequence[list[int]], temperature: float) -> Row:
    """Serves all prompts in full batches; returns what summarize() makes of it."""
    batch, answers = max(BATCHES), []
    for _ in range(REPEATS[temperature]):
        for at in range(0, len(inputs), batch):
            answers += ask(engine, inputs[at : at + batch], NEW_TOKENS, temperature, interval=1)
    return summarize(answers, len(inputs))


def summarize(answers: Sequence[Answer], count: int) -> Row:
    """One row of the answers to `count` prompts, which repeat in the same order.

    Returns:
        tokens_per_step: the bonus token counted, the prefill's not; `tokens` and `steps`: their sums a prompt;
        reached: the fraction of steps that accept at least 1, 2, … drafted tokens; seen: the fraction of answers
        whose every step is known, on which `reached` rests.
    """
    tokens, steps = [0] * count, [0] * count
    histogram: list[int] = []
    seen = 0
    for i, answer in enumerate(answers):
        tokens[i % count] += answer.new
        steps[i % count] += answer.steps
        if accepted := accepted_each_step(answer):
            seen += 1
            for drafts in accepted:
                histogram += [0] * (drafts + 1 - len(histogram))
                histogram[drafts] += 1
    total = sum(histogram)
    reached = [round(sum(histogram[k:]) / total, 4) for k in range(1, len(histogram))]
    return {"tokens_per_step": sum(tokens) / sum(steps), "reached": reached, "seen": round(seen / len(answers), 3),
            "tokens": tokens, "steps": steps}  # fmt: skip


def accepted_each_step(answer: Answer) -> list[int] | None:
    """Drafted tokens that each step accepted; None where chunks of several steps came as one."""
    jumps = [after - before for before, after in zip(answer.tokens, answer.tokens[1:], strict=False)]
    return [jump - 1 for jump in jumps] if len(jumps) == answer.steps and min(jumps, default=0) > 0 else None


def ratio(ours: Row, theirs: Row, draws: int = 1000) -> tuple[float, float]:
    """Tokens a step of one row over another's on the same prompts, and its standard error (bootstrap over prompts)."""
    rows = (ours["tokens"], ours["steps"], theirs["tokens"], theirs["steps"])

    def of(chosen: Sequence[int]) -> float:
        a, b, c, d = (sum(row[i] for i in chosen) for row in rows)
        return (a / b) / (c / d)

    pick, every = random.Random(0), range(len(rows[0]))
    spread = statistics.stdev(of(pick.choices(every, k=len(every))) for _ in range(draws))
    return of(every), spread
