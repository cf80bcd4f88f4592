# SPDX-License-Identifier: Apache-2.0
"""The width of each step. All ranks of tensor parallelism decide alike.

What goes into a decision is the same on every rank: the curve and the rest are rank 0's, lengths come from the
scheduler, and promises and paths from trees and tokens that the ranks share bit for bit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .acceptance import Acceptance
from .choose import best, rates
from .rest import Rest

if TYPE_CHECKING:
    from ..tree import Path
    from .curve import Curve

LISTEN = 8
"""One step in so many is learned from: it builds the largest trees too, to hear their promise."""

TRY_WIDER, WORTH_TRYING = 64, 0.8
"""One step in so many of a batch size (a multiple of LISTEN) verifies the next wider trees, where they seem at least
this good."""


class _Step(NamedTuple):
    bucket: int
    rung: int
    pass_seconds: float
    start: float


class Budget:
    """Chooses widths and learns from what they gave."""

    def __init__(
        self,
        curve: Curve,
        agree: Callable[[float], float] = float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        believed: Sequence[float] | None = None,
    ) -> None:
        """Args:
        curve: of the target, the same on all ranks.
        agree: gives every rank rank 0's value.
        clock: seconds.
        believed: tokens a step by width, taken instead of what is seen.
        """
        self.widths = curve.widths
        self.width = self.widths[-1]
        """Nodes of this step's trees."""
        self.listens = False
        """Whether this step is to be observed, with the promise of the largest trees."""
        self._curve, self._clock, self._believed = curve, clock, believed
        self._acceptance, self._rest = Acceptance(self.widths), Rest(agree)
        self._current: dict[int, int] = {}
        self._steps: Counter[int] = Counter()
        self._step: _Step | None = None

    def begin(self, bs: int, total: int) -> int:
        """A decode step starts, and the one before is over.

        Args:
            bs: requests.
            total: tokens of their contexts together.

        Returns:
            self.width.
        """
        now, bucket = self._clock(), self._curve.bucket(bs)
        if self._step is not None:
            before = self._step
            self._rest.add(before.bucket, self.widths[before.rung], now - before.start - before.pass_seconds)
        passes = self._curve.seconds(bs, total)
        rung = self.choose(bs, bucket, passes)
        self._steps[bucket] += 1
        self._step = _Step(bucket, rung, passes[rung], now)
        self.width = self.widths[rung]
        self.listens = self._steps[bucket] % LISTEN == 0
        return self.width

    def pause(self) -> None:
        """Something else comes before the next step, so that the time until then is not this step's."""
        self._step = None

    def observe(self, paths: Sequence[Path], promise: Sequence[float]) -> None:
        """What the target took of this step's trees, where it listens; see Acceptance.observe."""
        self._acceptance.observe(self.width, paths, promise)

    def choose(self, bs: int, bucket: int, passes: Sequence[float]) -> int:
        """Index of this step's width; of the largest while nothing is known of the rest.

        Args:
            bs: requests.
            bucket: captured batch size in which they run.
            passes: seconds of the target pass by width.
        """
        widest = len(self.widths) - 1
        rests = [self._rest.at(bucket, width) for width in self.widths]
        known = [rest for rest in rests if rest is not None]
        if not known:
            return widest
        seconds = [max(cost + rest, cost / 2) for cost, rest in zip(passes, known, strict=True)]
        found = rates(bs, self._believed or self._acceptance.tokens(), seconds)
        rung = self._current[bucket] = best(found, self._current.get(bucket))
        if rung < widest and (self._steps[bucket] + 1) % TRY_WIDER == 0:
            return rung + (found[rung + 1] >= WORTH_TRYING * found[rung])
        return rung
