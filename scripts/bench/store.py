# SPDX-License-Identifier: Apache-2.0
"""Rows on disk: each is kept the moment it is measured, and not measured again by a later run.

`NAME.json` is the report. `NAME.jsonl` beside it is the journal: a row a line, appended in one write.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

KEY = ("impl", "bs", "heads", "n", "kv", "slots", "pool", "batch", "card", "build")
"""Two rows that agree in these are the same measurement: `build` names the code that was timed."""


def key(row: Row, fields: Sequence[str] = KEY) -> tuple[Any, ...]:
    """What a measurement is told by."""
    return tuple(row.get(name) for name in fields)


class Store:
    """The rows of one report.

    Args:
        report: path of the JSON report; its folder is made.
        fields: what tells its measurements apart.
    """

    def __init__(self, report: Path, fields: Sequence[str] = KEY) -> None:
        self.report, self.journal, self.fields = report, report.with_suffix(".jsonl"), fields
        report.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[tuple[Any, ...], Row] = {key(row, fields): row for row in self._read()}

    def _read(self) -> list[Row]:
        if not self.journal.exists():
            return []
        text = self.journal.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a run was cut off in mid-line: what follows must start on a line of its own
            os.truncate(self.journal, len(whole.encode()))
        return [json.loads(line) for line in whole.splitlines()]

    def done(self, wanted: Row) -> bool:
        """Whether this measurement is there and need not be repeated: it succeeded, or took longer than the cap."""
        row = self.rows.get(key(wanted, self.fields))
        return row is not None and "failed" not in row

    def add(self, row: Row) -> None:
        """Keeps a row, in place of an older one with the same key."""
        self.rows.pop(key(row, self.fields), None)
        self.rows[key(row, self.fields)] = row
        line = json.dumps(row) + "\n"
        with open(self.journal, "ab", buffering=0) as file:
            file.write(line.encode())

    def write_report(self, header: Row, rows: Iterable[Row], **sections: Any) -> None:
        """Replaces the report: header, sections, then the rows given, one a line."""
        head = json.dumps({**header, **sections}, indent=1)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        partial = self.report.with_suffix(".json.part")
        partial.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(partial, self.report)


def rounded(row: Row) -> Row:
    """The row with floats to five significant digits; None for what is not finite, which JSON cannot say."""

    def short(value: float) -> float | None:
        return float(f"{value:.5g}") if math.isfinite(value) else None

    return {name: short(value) if isinstance(value, float) else value for name, value in row.items()}
