# SPDX-License-Identifier: Apache-2.0
"""Moves of KV rows to be timed: long lists of a defragmentation, short ones of a verify step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from treeverify.kv import ops
from treeverify.kv.pools import Buffers

from .store import Row, rounded
from .timer import Timer

ROW_BYTES = 1152
"""Of MLA in bf16."""

LAYOUTS = ("random", "gather", "contiguous")
"""Random slots to random ones, random ones to a contiguous run, a contiguous run to another."""

ACCEPTED = 16
"""Nodes of the longest path of a step, its root among them, which never moves."""

NODES = 64
"""Of a step's trees."""

COPY_GOAL, STEP_GOAL_US = 0.6, 25.0
LONG, STEP_BATCH = 4096, 8
"""Rows from which on the first goal counts, and the batch of the second."""

KEY = ("what", "rows", "slots", "bs", "kv", "heads", "n", "layers", "card", "build")
"""What tells the rows of bench_kv.py apart."""


class Move(NamedTuple):
    """A list of `rows` moves (bs 0), or a step's of `bs` requests."""

    rows: int
    slots: str
    bs: int = 0


@dataclass
class Pools:
    """Layers' buffers of random bytes, on one device."""

    tensors: list[torch.Tensor]
    generator: torch.Generator

    @classmethod
    def of(cls, layers: int, slots: int, device: torch.device, seed: int = 0) -> Pools:
        """uint8 [slots, ROW_BYTES] a layer."""
        generator = torch.Generator(device).manual_seed(seed)
        words = torch.randint(1 << 62, (slots, ROW_BYTES // 8), device=device, generator=generator)
        return cls([(words + i).view(torch.uint8) for i in range(layers)], generator)

    def lists(self, move: Move) -> tuple[torch.Tensor, torch.Tensor, int]:
        """src and dst, int64, and the group: no slot of a long list is on both sides."""
        slots, device = self.tensors[0].shape[0], self.tensors[0].device
        if move.bs:
            pages = torch.randperm(slots // NODES, device=device, generator=self.generator)[: move.bs]
            first = (pages * NODES)[:, None]
            path = torch.stack([
                torch.randperm(NODES - 1, device=device, generator=self.generator)[: ACCEPTED - 1].sort().values + 1
                for _ in range(move.bs)
            ])  # fmt: skip
            places = torch.arange(1, ACCEPTED, device=device).expand(move.bs, -1)
            return (first + path).flatten(), (first + places).flatten(), ACCEPTED - 1
        order = torch.randperm(slots - move.rows, device=device, generator=self.generator) + move.rows
        run = torch.arange(move.rows, device=device)
        if move.slots == "contiguous":
            return run + move.rows, run, 0
        return order[: move.rows], run if move.slots == "gather" else order[move.rows : 2 * move.rows], 0


class MoveBench:
    """Times moves over all layers.

    Args:
        copy_gbs: what a large copy reaches, both ways counted; 0: not known.
    """

    def __init__(self, pools: Pools, timer: Timer, copy_gbs: float, label: Mapping[str, Any]) -> None:
        self.pools, self.timer, self.copy_gbs, self._label = pools, timer, copy_gbs, label
        self.buffers = Buffers.of(pools.tensors)

    def label(self, move: Move) -> Row:
        """The fields that tell its row."""
        what = {"what": "step" if move.bs else "move", **move._asdict(), "layers": len(self.pools.tensors)}
        return {**what, **self._label}

    def __call__(self, move: Move) -> Row:
        """Its row: microseconds, GB/s read and written, share of the copy rate; `wrong` where rows are not right."""
        src, dst, group = self.pools.lists(move)
        to = self.buffers
        ends = (self.pools.tensors[0], self.pools.tensors[-1])
        before = [tensor[src] for tensor in ends]

        def run() -> None:
            ops.kv_move(to.bases, to.row_bytes, to.longest, to.slots, src, dst, None, group)

        run()
        row = self.label(move)
        if not all(torch.equal(tensor[dst], due) for tensor, due in zip(ends, before, strict=True)):
            row["wrong"] = True
        row["us"] = self.timer(run)
        row["gbs"] = 2 * len(src) * ROW_BYTES * len(to.tensors) / row["us"] / 1e3
        if self.copy_gbs:
            row["of_copy"] = row["gbs"] / self.copy_gbs
        return rounded(row)


def copy_gbs(timer: Timer, device: torch.device) -> float:
    """GB/s of a plain copy of 2 GiB, both ways counted."""
    x = torch.ones((1 << 31) if device.type == "cuda" else (1 << 20), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / timer(lambda: y.copy_(x)) / 1e3


def gates(rows: Iterable[Row]) -> list[Row]:
    """The goals, what was measured, and whether they are met; None where measurements are missing."""
    rows = list(rows)
    long = [r["of_copy"] for r in rows if r["what"] == "move" and r["rows"] >= LONG and "of_copy" in r]
    step = [r["us"] for r in rows if r["what"] == "step" and r["bs"] == STEP_BATCH]
    wrong = sum("wrong" in r for r in rows)

    def gate(goal: str, found: Sequence[float], worst: Callable[..., float], met: Callable[[float], bool]) -> Row:
        return {"goal": goal, "found": worst(found) if found else None, "met": met(worst(found)) if found else None}

    return [
        gate(f"moves of {LONG} rows and more: >= {COPY_GOAL} of the copy rate", long, min, lambda x: x >= COPY_GOAL),
        gate(f"a step's path, batch {STEP_BATCH}: <= {STEP_GOAL_US} us", step, max, lambda x: x <= STEP_GOAL_US),
        {"goal": "wrong rows: 0", "found": wrong, "met": wrong == 0},
    ]


def payback(rows: Iterable[Row], layers: int) -> list[Row]:
    """For each context: verify time on scattered and on contiguous slots, and after how many steps a move pays.

    None where it never does.
    """
    rows, found = list(rows), []
    us = {(r["kv"], r["slots"]): r["us"] for r in rows if r["what"] == "verify" and "us" in r}
    moves = {r["rows"]: r["us"] for r in rows if r["what"] == "move" and r["slots"] == "gather"}
    for kv in sorted({kv for kv, _ in us}):
        if (kv, "random") not in us or (kv, "contiguous") not in us:
            continue
        gain = us[kv, "random"] - us[kv, "contiguous"]
        row = {"kv": kv, "random_us": us[kv, "random"], "contiguous_us": us[kv, "contiguous"], "gain_us": gain}
        row |= {f"{slots}_us": us[kv, slots] for slots in ("paged",) if (kv, slots) in us}
        if kv in moves:
            row["move_us"] = moves[kv]
            row["steps_to_pay"] = moves[kv] / (gain * layers) if gain > 0 else None
        found.append(rounded(row))
    return found
