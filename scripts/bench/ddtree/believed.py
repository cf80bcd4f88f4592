# SPDX-License-Identifier: Apache-2.0
"""What an adaptive server is told where its drafter has random weights: the acceptance of the trained one."""

from __future__ import annotations

from collections.abc import Iterable

from ..store import Row
from .modes import BLOCK
from .rows import Server


def environment(server: Server, rows: Iterable[Row]) -> dict[str, str] | None:
    """Variables for the process that is timed.

    Args:
        rows: of the report; those of the same card and build with greedy acceptance count.

    Returns:
        None where the acceptance of a width is missing.
    """
    if not server.mode.adapts:
        return {}
    from treeverify.ddtree.budget.widths import ADAPT, BELIEVE, ladder

    found = {row["n"]: row["tokens_per_step"] for row in rows
             if (row["stage"], row["mode"], row.get("temperature")) == ("acceptance", "ddtree", 0.0)
             and (row["card"], row["build"]) == (server.card, server.build) and "failed" not in row}  # fmt: skip
    widths = ladder(server.mode.width, BLOCK)
    if not set(widths) <= found.keys():
        return None
    return {ADAPT: "1", BELIEVE: ",".join(f"{width}:{found[width]}" for width in widths)}
