# SPDX-License-Identifier: Apache-2.0
"""What the rows of a soak add up to: whether its waves were served right, and whether it was long enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from churn import exact_pool

Row = dict[str, Any]

SECONDS, REQUESTS = 1200, 5000
"""A soak is at least so long (servers side by side count once), and has so many requests that came to their end."""

ALLOCATED, RESERVED = 16 << 20, 512 << 20
"""Bytes by which what PyTorch has handed out at rest, and what it holds, may exceed the first third of a piece."""

FEWEST = 3
"""Waves of a piece from which memory is judged."""

SHOWN = ("stopped", "left", "aborted", "cached_tokens", "streamed", "sampled", "greedy")
"""What must have happened on every server."""


def wave_ok(row: Row) -> bool:
    """Whether nothing went wrong: no answer at fault, no NaN, no complaint in the log, every slot accounted for."""
    pool = row.get("pool")
    return not row["faults"] and not row["complaints"] and bool(pool) and exact_pool(pool) and pool["nan_rows"] == 0


def seconds(rows: Iterable[Row]) -> float:
    """During which at least one wave ran."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((row["begin"], row["end"]) for row in rows):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def memory(rows: Sequence[Row]) -> Row:
    """How far memory at rest grew in the piece that grew most; a piece is one server from its start on.

    `ok` is None where no piece has FEWEST waves.
    """
    worst: Row = {"allocated": 0, "reserved": 0, "ok": None}
    for _, piece in itertools.groupby(sorted(rows, key=lambda row: row["begin"]), key=lambda row: row["piece"]):
        pools = [row["pool"] for row in piece if row.get("pool")]
        if len(pools) >= FEWEST:
            first = -(-len(pools) // 3)
            for kind in ("allocated", "reserved"):
                before, after = (max(pool[kind] for pool in part) for part in (pools[:first], pools[first:]))
                worst[kind] = max(worst[kind], after - before)
            worst["ok"] = worst["allocated"] <= ALLOCATED and worst["reserved"] <= RESERVED
    return worst


def server(name: str, rows: Sequence[Row], right: bool, waves: int) -> Row:
    """One row about a server: sums of its waves' counts, and what is missing.

    Args:
        right: False for the negative control, whose waves must run and whose outputs are judged elsewhere.
        waves: how many it is meant to have.
    """
    sums = {kind: sum(row["counts"].get(kind, 0) for row in rows) for kind in ("complete", *SHOWN)}
    sizes = sorted({size for row in rows if row.get("pool") for size in row["pool"]["batch_sizes"]})
    grown = memory(rows)
    missing = [kind for kind in SHOWN if not sums[kind]] if right else []
    if right and not (len(sizes) >= 8 and sizes[-1] >= 24):
        missing.append("batches of many sizes")
    ok = all(map(wave_ok, rows)) and len(rows) >= waves and not missing and grown["ok"] is not False
    return {"server": name, "waves": len(rows), **sums, "batch_sizes": sizes, "missing": missing, "memory": grown,
            "retracted": sum(row["pool"]["retracted"] for row in _lasts(rows)), "ok": ok}  # fmt: skip


def _lasts(rows: Iterable[Row]) -> list[Row]:
    """The last wave of every piece: its hook counts from the server's start."""
    by_piece = {row["piece"]: row for row in sorted(rows, key=lambda row: row["begin"]) if row.get("pool")}
    return list(by_piece.values())


def whole(rows: Sequence[Row]) -> Row:
    """One row about all of it."""
    took, served = seconds(rows), sum(row["counts"]["complete"] for row in rows)
    return {"soak": "whole", "seconds": round(took), "requests": served, "goal": f">= {SECONDS} s, {REQUESTS} requests",
            "ok": took >= SECONDS and served >= REQUESTS}  # fmt: skip
