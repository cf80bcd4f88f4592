# SPDX-License-Identifier: Apache-2.0
"""Moves of KV rows to test with: buffers of random bytes between guards, and lists of moves of every kind."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from treeverify.kv import ops
from treeverify.kv.pools import Buffers

GUARD = 4
"""Rows on either side of a buffer that nobody may touch."""


@dataclass
class Case:
    """A move and the memory it works on."""

    memory: list[torch.Tensor]
    """uint8 [GUARD + slots + GUARD, row bytes] a buffer."""
    buffers: Buffers
    src: torch.Tensor
    dst: torch.Tensor
    count: torch.Tensor | None
    group: int

    def args(self) -> ops.MoveArgs:
        to = self.buffers
        return ops.MoveArgs(
            to.bases, to.row_bytes, to.longest, to.slots, self.src, self.dst, self.count, self.group
        )

    def expected(self) -> list[torch.Tensor]:
        """The memory afterwards, by plain assignment of rows that were read before."""
        after = [m.clone() for m in self.memory]
        count = len(self.src) if self.count is None else min(max(int(self.count), 0), len(self.src))
        src, dst = self.src[:count].long(), self.dst[:count].long()
        moves = (src != dst) & (src >= 0) & (src < self.buffers.slots) & (dst >= 0) & (dst < self.buffers.slots)
        for before, now in zip(self.memory, after, strict=True):
            now[GUARD + dst[moves]] = before[GUARD + src[moves]]
        return after


def case(
    seed: int, widths: list[int], slots: int, moves: list[tuple[int, int]], *, group: int, count: int | None = None,
    index: torch.dtype = torch.int64, device: str = "cpu",
) -> Case:  # fmt: skip
    """Buffers of random bytes, rows of `widths` bytes."""
    generator = torch.Generator().manual_seed(seed)
    memory = [
        torch.randint(256, (slots + 2 * GUARD, width), dtype=torch.uint8, generator=generator).to(device)
        for width in widths
    ]
    src, dst = torch.tensor(moves, dtype=index).view(-1, 2).T.contiguous().to(device)
    counted = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    return Case(memory, Buffers.of([m[GUARD:-GUARD] for m in memory]), src, dst, counted, group)


def paths(draw: random.Random, requests: int, n: int, group: int, slots: int) -> list[tuple[int, int]]:
    """As a verify step has them: each request's accepted nodes to the slots of a chain, padded with none."""
    free = draw.sample(range(slots), requests * n)
    moves = []
    for b in range(requests):
        mine = free[b * n : (b + 1) * n]
        path = sorted(draw.sample(range(1, n), draw.randint(0, min(group, n - 1))))
        moves += [(mine[node], mine[i + 1]) for i, node in enumerate(path)]
        moves += [(mine[0], mine[0]) if draw.random() < 0.5 else (-1, mine[0])] * (group - len(path))
    return moves


def rings(draw: random.Random, groups: int, group: int, slots: int) -> list[tuple[int, int]]:
    """Every row of a group moves to another's place: none can be written before it was read."""
    free = draw.sample(range(slots), groups * group)
    moves = []
    for g in range(groups):
        mine = free[g * group : (g + 1) * group]
        moves += draw.sample(list(zip(mine, mine[1:] + mine[:1], strict=True)), group)
    return moves


def apart(draw: random.Random, count: int, slots: int) -> list[tuple[int, int]]:
    """From slots to other ones; some are copied more than once."""
    chosen = draw.sample(range(slots), 2 * count)
    return [(draw.choice(chosen[:count]), dst) for dst in chosen[count:]]
