# SPDX-License-Identifier: Apache-2.0
"""The rows of bench_marshal.py for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| call | way | µs, median | µs, 99th percentile |", "|---|---|---|---|"]
    for row in rows:
        what = row["call"] if "backend" not in row else "{call} {backend}, {real} of {bs} x {n}".format(**row)
        times = ("skipped", "") if "skipped" in row else (row["median_us"], row["p99_us"])
        lines.append(f"| {what} | {row['way']} | {times[0]} | {times[1]} |")
    return "\n".join(lines)
