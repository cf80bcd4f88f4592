# SPDX-License-Identifier: Apache-2.0
"""What a DDTREE server says about itself: nodes a tree, and where a step's time goes.

Times are the device's own, between CUDA events that one step in `EVERY` records; nobody waits for them: a report takes
the steps that are over. Stages follow each other, so that idle time of the device counts for the stage it waits in.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tree import Path

logger = logging.getLogger(__name__)

STAGES = ("draft", "build", "prep", "verify", "walk", "commit")
"""Draft pass; candidates and trees; slots, metadata and mask; target pass; the target's tokens and the paths along
them; slots, hidden states and draft KV of what was accepted. SGLang's own attention backends prepare within verify."""

EVERY = 8
KEPT = 64
"""Measured steps that wait for a report at most; older ones are dropped."""


class _Measured(NamedTuple):
    """A step that is over, or will be."""

    marks: list[tuple[str, Any]]
    sizes: torch.Tensor | None
    """int32 [bs] on the host, there when the step is over: of its trees, where nobody counts them."""


class Report(NamedTuple):
    """Means since the last report."""

    nodes: float
    """Real nodes of a tree, the root among them."""
    seconds: dict[str, float]
    """Of each stage of a step."""

    def line(self) -> str:
        """For the scheduler's log line."""
        times = " ".join(f"{stage} {1e3 * seconds:.2f}" for stage, seconds in self.seconds.items())
        return f"tree nodes: {self.nodes:.1f}, " + (f"step ms: {times}, " if times else "")


class Stats:
    """Counts of the steps since the last report."""

    def __init__(self, device: str | torch.device) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._steps = self._trees = self._nodes = 0
        self._measured: deque[_Measured] = deque(maxlen=KEPT)
        self._marks: list[tuple[str, Any]] | None = None

    def begin(self) -> None:
        """A step starts."""
        self._marks = [("", self._now())] if self._steps % EVERY == 0 else None
        self._steps += 1

    def mark(self, stage: str) -> None:
        """A stage of the step has been launched whole."""
        if self._marks is not None:
            self._marks.append((stage, self._now()))

    def end(self, sizes: torch.Tensor | None = None) -> None:
        """The step is launched whole.

        Args:
            sizes: int32 [bs], of its trees, for workers that do not count() them on the host.
        """
        copied = None
        if self._marks is not None and sizes is not None:
            copied = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=self._cuda)
            copied.copy_(sizes, non_blocking=True)
        self.mark(STAGES[-1])
        if self._marks is not None:
            self._measured.append(_Measured(self._marks, copied))
        self._marks = None

    def count(self, paths: Sequence[Path]) -> None:
        """The trees of a step."""
        self._trees += len(paths)
        self._nodes += sum(abs(path.size) for path in paths)

    def report(self) -> Report:
        """What happened since the last report; starts anew."""
        seconds = dict.fromkeys(STAGES, 0.0)
        over = 0
        while self._measured and self._is_over(self._measured[0].marks):
            marks, sizes = self._measured.popleft()
            self._take(sizes)
            for (_, start), (stage, end) in zip(marks, marks[1:], strict=False):
                seconds[stage] += self._between(start, end)
            over += 1
        nodes = self._nodes / max(self._trees, 1)
        self._trees = self._nodes = 0
        return Report(nodes, {stage: s / over for stage, s in seconds.items() if s} if over else {})

    def _take(self, sizes: torch.Tensor | None) -> None:
        if sizes is None:
            return
        self._trees += len(sizes)
        self._nodes += int(sizes.abs().sum())
        if broken := int((sizes < 0).sum()):
            logger.error(
                "treeverify: the drafter's log-probabilities held NaN for %d of %d requests of a step; nothing was "
                "drafted for them in it. The output is the target's all the same.", broken, len(sizes),
            )  # fmt: skip

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _is_over(self, marks: list[tuple[str, Any]]) -> bool:
        return not self._cuda or bool(marks[-1][1].query())

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._cuda else float(end - start)
