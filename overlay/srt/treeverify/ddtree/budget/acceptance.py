# SPDX-License-Identifier: Apache-2.0
"""Tokens that a step gives at each width, expected from the recent past.

Trees are nested: the first w nodes of a tree are the tree of w nodes, and the target's path in that one is the part of
the path with numbers below w. So a step tells, for each width up to its own, what the target would have taken there.
For wider trees there is what the drafter promises: a node's probability is that of its path (arXiv 2604.12989,
proposition 1). The promise of each rung (the nodes that a width adds to the one before) is scaled by how much of it the
target kept when that rung was last verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tree import Path

RECENT = 1 / 8
"""Weight of a step in the mean promise."""

KEPT = 1 / 32
"""Weight of a step in the share of the promise that is kept: noisier than the promise, and slower to change."""

FORGOTTEN = 1 / 128
"""How fast the share of a rung is forgotten while it is not verified: the drafter is believed again, and tried."""

PRIOR = 1.0
"""Accepted tokens that speak for the drafter's promise beforehand."""


class Acceptance:
    """Of a batch, per request and step."""

    def __init__(self, widths: Sequence[int]) -> None:
        """Args:
        widths: ascending.
        """
        self._rungs = list(zip([1, *widths], widths, strict=False))
        rungs = len(self._rungs)
        self._promise, self._weight = [0.0] * rungs, [0.0] * rungs
        self._promised, self._taken = [0.0] * rungs, [0.0] * rungs

    def observe(self, width: int, paths: Sequence[Path], promise: Sequence[float]) -> None:
        """A step.

        Args:
            width: nodes of the trees that were verified.
            paths: what the target took of each.
            promise: probability of each node under the drafter, mean over the trees; node 0 is the root. Of `width`
                nodes, or of more that were not verified.
        """
        for i, (first, end) in enumerate(self._rungs):
            if end <= len(promise):
                promised = sum(promise[first:end])
                self._promise[i] += RECENT * (promised - self._promise[i])
                self._weight[i] += RECENT * (1 - self._weight[i])
            if end <= width:
                taken = sum(first <= node < end for path in paths for node in path.nodes) / len(paths)
                self._promised[i] += promised - KEPT * self._promised[i]
                self._taken[i] += taken - KEPT * self._taken[i]
            else:
                self._promised[i] *= 1 - FORGOTTEN
                self._taken[i] *= 1 - FORGOTTEN

    def tokens(self) -> list[float]:
        """Of a request and step, the bonus token among them, by width."""
        total, found = 1.0, []
        for promise, weight, promised, taken in zip(
            self._promise, self._weight, self._promised, self._taken, strict=True
        ):
            total += promise / (weight or 1.0) * (taken + PRIOR) / (promised + PRIOR)
            found.append(total)
        return found
