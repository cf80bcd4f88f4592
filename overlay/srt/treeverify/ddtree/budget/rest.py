# SPDX-License-Identifier: Apache-2.0
"""What a step costs beside the target's graph: drafting, trees, sampling, commit, and the host.

By the host's clock from one step to the next, less the curve's target pass: with it, a width that was served costs what
it did cost. Clocks differ between ranks of tensor parallelism, which must choose alike: rank 0's median counts, agreed
upon now and then, after the same step everywhere.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable

FIRST, EVERY, KEPT = 8, 64, 32
"""Steps of a kind before its first median; between medians; that a median is of."""


class Rest:
    """Seconds by captured batch size and width."""

    def __init__(self, agree: Callable[[float], float]) -> None:
        """Args:
        agree: gives every rank rank 0's value.
        """
        self._agree = agree
        self._steps: Counter[tuple[int, int]] = Counter()
        self._recent: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._known: dict[tuple[int, int], float] = {}

    def add(self, bucket: int, width: int, seconds: float) -> None:
        """A step is over. Called for the same steps on all ranks."""
        key = bucket, width
        self._recent[key].append(seconds)
        self._steps[key] += 1
        if self._steps[key] == FIRST or self._steps[key] % EVERY == 0:
            self._known[key] = self._agree(statistics.median(self._recent[key]))

    def at(self, bucket: int, width: int) -> float | None:
        """Of the nearest batch size known, and there of the nearest width; None while there is none."""

        def distance(key: tuple[int, int]) -> tuple[float, float]:
            return abs(math.log(key[0] / bucket)), abs(math.log(key[1] / width))

        return self._known[min(self._known, key=distance)] if self._known else None
