# SPDX-License-Identifier: Apache-2.0
"""What a target pass costs: seconds by width, batch and context."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Of one captured batch size."""

    contexts: tuple[int, ...]
    """Tokens of each request, ascending."""
    seconds: tuple[tuple[float, ...], ...]
    """By width, then by context."""

    @classmethod
    def of(cls, contexts: Sequence[int], seconds: Sequence[Sequence[float]]) -> Costs:
        """From measurements, by width and context: neither more nodes nor a longer context may seem cheaper."""
        by_context = [isotonic(column) for column in zip(*seconds, strict=True)]
        by_width = zip(*by_context, strict=True)
        return cls(tuple(contexts), tuple(tuple(_running_max(row)) for row in by_width))

    def at(self, context: float) -> list[float]:
        """Seconds of each width, linear between the contexts and past the last two; no less than at the first."""
        if len(self.contexts) == 1:
            return [row[0] for row in self.seconds]
        right = min(max(bisect.bisect_left(self.contexts, context), 1), len(self.contexts) - 1)
        low, high = self.contexts[right - 1], self.contexts[right]
        share = max((context - low) / (high - low), 0.0)
        return [row[right - 1] + share * (row[right] - row[right - 1]) for row in self.seconds]


@dataclass(frozen=True)
class Curve:
    """Of all captured batch sizes, some of which are measured."""

    widths: tuple[int, ...]
    """Ascending."""
    captured: tuple[int, ...]
    """Batch sizes that have a graph, ascending: a batch runs in the smallest that holds it."""
    costs: Mapping[int, Costs]
    """By measured batch size."""

    def bucket(self, bs: int) -> int:
        """The captured batch size in which `bs` requests run; the largest for more, which run outside graphs."""
        return self.captured[min(bisect.bisect_left(self.captured, bs), len(self.captured) - 1)]

    def seconds(self, bs: int, total: int) -> list[float]:
        """Of a target pass, by width.

        Args:
            bs: requests.
            total: tokens of their contexts together.
        """
        size = self.bucket(bs)
        context, measured = total / size, sorted(self.costs)
        right = min(bisect.bisect_left(measured, size), len(measured) - 1)
        high = self.costs[measured[right]].at(context)
        if right == 0 or measured[right] <= size:
            return high
        low = self.costs[measured[right - 1]].at(context)
        share = (size - measured[right - 1]) / (measured[right] - measured[right - 1])
        return [a + share * (b - a) for a, b in zip(low, high, strict=True)]

    def line(self) -> str:
        """For the log: milliseconds of each width."""
        parts = []
        for bs, costs in sorted(self.costs.items()):
            columns = zip(costs.contexts, zip(*costs.seconds, strict=True), strict=True)
            cells = (f"{context}: " + "/".join(f"{1e3 * s:.2f}" for s in column) for context, column in columns)
            parts.append(f"batch {bs} " + ", ".join(cells))
        return f"ms of a target pass of {'/'.join(map(str, self.widths))} nodes by context: " + "; ".join(parts)


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence that is closest in squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, members
    for value in values:
        mean, members = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, members = (before * count + mean * members) / (count + members), count + members
        pools.append((mean, members))
    return [mean for mean, members in pools for _ in range(members)]


def _running_max(values: Sequence[float]) -> list[float]:
    highest: list[float] = []
    for value in values:
        highest.append(max(value, highest[-1]) if highest else value)
    return highest
