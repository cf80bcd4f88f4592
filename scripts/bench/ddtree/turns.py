# SPDX-License-Identifier: Apache-2.0
"""The order of the stage `speed`: every cell's servers one right after the other, and so again in each round.

How fast a host launches changes over minutes, by a third and more. So servers are compared within a round of a cell,
whose runs lie seconds apart. A round is never completed later: what is missing is measured in new rounds, by all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..store import Row, Store
from .rows import Server
from .speed import CELLS, Cell

ROUNDS = 5
"""Of each cell. The middle one counts: odd, so that it is a ratio that was seen."""


class Turn(NamedTuple):
    """All servers at one cell."""

    round: int
    cell: Cell

    def order(self, servers: Sequence[Server]) -> list[Server]:
        """Forwards, and backwards in the next round: a host that slows down does not always slow the same one."""
        return list(servers if self.round % 2 else reversed(servers))


def wanted(servers: Sequence[Server], store: Store, rounds: int = ROUNDS) -> list[Turn]:
    """What is left to do: cell by cell and then again, so that a run that is cut off has them all, and the next one
    brings those up that lag behind."""
    plan = []
    for cell in CELLS:
        seen = set(_rounds(store.rows.values(), cell))
        whole = [number for number in seen if all(store.done(server.label(cell, number)) for server in servers)]
        first = max(seen, default=0) + 1
        plan.append([Turn(first + i, cell) for i in range(rounds - len(whole))])
    return [turns[-left] for left in range(rounds, 0, -1) for turns in plan if left <= len(turns)]


def _rounds(rows: Iterable[Row], cell: Cell) -> Iterator[int]:
    """Numbers taken at a cell, by whichever server, card and build."""
    for row in rows:
        if (row.get("context"), row.get("bs")) == cell and row.get("round") is not None:
            yield row["round"]
