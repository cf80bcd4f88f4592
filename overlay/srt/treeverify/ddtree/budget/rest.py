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
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST, EVERY, KEPT = 8, 64, 32
"""Steps of a kind before its first median; between medians; that a median is of, at most."""

FRESH = 2 * EVERY
"""Steps of a batch size after which one of them, or a median, counts no more. Hosts get slower and faster, and contexts
longer, by more than widths differ here: an old rest beside a new one would keep a width from its turn."""


class Rest:
    """Seconds by captured batch size and width."""

    def __init__(self, agree: Callable[[float], float]) -> None:
        """Args:
        agree: gives every rank rank 0's value.
        """
        self._agree = agree
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)

    def add(self, bucket: int, width: int, seconds: float) -> None:
        """A step is over. Called for the same steps on all ranks."""
        size = self._sizes[bucket]
        size.now += 1
        size.count[width] += 1
        recent = size.recent[width]
        recent.append(_At(size.now, seconds))
        while size.now - recent[0].step >= FRESH:
            recent.popleft()
        due = width not in size.known or size.count[width] % EVERY == 0
        if due and len(recent) >= FIRST:
            size.known[width] = _At(size.now, self._agree(statistics.median(one.seconds for one in recent)))
            size.known = {w: median for w, median in size.known.items() if size.now - median.step < FRESH}

    def at(self, bucket: int, width: int) -> float | None:
        """Of the nearest batch size known, and there of the nearest width; None while there is none."""
        sizes = [bs for bs, size in self._sizes.items() if size.known]
        if not sizes:
            return None
        known = self._sizes[min(sizes, key=lambda bs: abs(math.log(bs / bucket)))].known
        return known[min(known, key=lambda other: abs(math.log(other / width)))].seconds


class _At(NamedTuple):
    step: int
    """Of its batch size."""
    seconds: float


@dataclass
class _Size:
    """A captured batch size, by width."""

    now: int = 0
    count: Counter[int] = field(default_factory=Counter)
    recent: defaultdict[int, deque[_At]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    known: dict[int, _At] = field(default_factory=dict)
    """Medians."""
