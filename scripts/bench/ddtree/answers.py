# SPDX-License-Identifier: Apache-2.0
"""Requests to an sglang.Engine, answered in chunks whose arrival is noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What came back for one request."""

    seconds: list[float]
    """When each chunk came."""
    tokens: list[int]
    """New tokens there were by then; the first chunk is the prefill's token."""
    meta: dict[str, Any]
    """meta_info of the last chunk."""

    @property
    def new(self) -> int:
        """Tokens of decode steps: all but the prefill's."""
        return int(self.tokens[-1]) - 1

    @property
    def steps(self) -> int:
        """Decode steps; without speculation as many as tokens."""
        return int(self.meta.get("spec_verify_ct", self.new))


def collect(
    chunks: Iterable[dict[str, Any]], count: int, clock: Callable[[], float] = time.perf_counter
) -> list[Answer]:
    """The answers to `count` requests from the chunks of all, in whatever order they come."""
    seconds: list[list[float]] = [[] for _ in range(count)]
    tokens: list[list[int]] = [[] for _ in range(count)]
    last: list[dict[str, Any]] = [{} for _ in range(count)]
    for chunk in chunks:
        at = chunk.get("index", 0)
        seconds[at].append(clock())
        tokens[at].append(chunk["meta_info"]["completion_tokens"])
        last[at] = chunk["meta_info"]
    return [Answer(*parts) for parts in zip(seconds, tokens, last, strict=True)]


def ask(engine: Any, inputs: Sequence[list[int]], new_tokens: int, temperature: float, interval: int) -> list[Answer]:
    """Has a batch answered.

    Args:
        inputs: token ids of each prompt.
        new_tokens: tokens that each answer has, whatever they are.
        temperature: 0 is greedy.
        interval: tokens a chunk; the first token and the end come at once all the same.
    """
    sampling = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True,
                "stream_interval": interval}  # fmt: skip
    chunks = engine.generate(input_ids=list(inputs), sampling_params=sampling, stream=True)
    return collect(chunks, len(inputs))
