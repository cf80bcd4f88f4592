# SPDX-License-Identifier: Apache-2.0
"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from applier.contract import Checked


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns under a head."""
    cells = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def contract_table(rows: Sequence[Checked]) -> str:
    """One line a row of the dtype contract, with file:line."""
    body = []
    for checked in rows:
        row, found = checked.row, checked.finding
        place = f"{row.file}:{found.line}" if found else row.file
        dtype = found.dtype if found else "?"
        body.append(
            (row.backend, row.path, row.name, dtype, row.dtype, "" if checked.problem is None else "DIFFERS", place)
        )
    return table(("backend", "path", "tensor", "source", "contract", "", "where"), body)


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """Registers, spills and shared memory of every kernel and architecture."""
    keys = ("kernel", "arch", "registers", "spill_bytes", "shared_bytes", "threads")
    return table(keys, [[row[key] for key in keys] for row in rows])
