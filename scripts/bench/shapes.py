# SPDX-License-Identifier: Apache-2.0
"""Which verify steps the bench times, the most telling first."""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Shape(NamedTuple):
    """A batch of `bs` requests with `kv` tokens of context and `n` draft tokens each, `heads` query heads a rank."""

    bs: int
    heads: int
    n: int
    kv: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From BS,H,N,KV.

        Raises:
            ValueError: not four positive integers.
        """
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise ValueError(f"{text!r} is no shape: expected batch size, heads, n, context, such as 1,8,9,1024")
        return cls(*numbers)

    @property
    def kv_tokens(self) -> int:
        """Positions the batch attends to, draft included."""
        return self.bs * (self.kv + self.n)

    @property
    def query_rows(self) -> int:
        """(token, head) pairs of the batch."""
        return self.bs * self.n * self.heads


BASELINES = [
    Shape(1, 8, 9, 1024),
    Shape(1, 8, 9, 32768),
    Shape(1, 8, 9, 200_000),
    Shape(1, 64, 9, 32768),
    Shape(8, 8, 9, 32768),
    Shape(8, 64, 9, 32768),
]
"""Where the goals are set, and where every peer is timed."""

MORE = [
    Shape(1, 16, 9, 200_000),
    Shape(1, 128, 9, 32768),
    Shape(1, 8, 64, 32768),
    Shape(32, 8, 9, 4096),
    Shape(4, 16, 16, 128_000),
    Shape(8, 128, 32, 4096),
    Shape(1, 8, 9, 4096),
    Shape(1, 64, 9, 4096),
    Shape(1, 64, 9, 200_000),
    Shape(8, 8, 9, 1024),
    Shape(8, 8, 9, 200_000),
    Shape(8, 64, 9, 1024),
    Shape(8, 64, 9, 4096),
]
"""Further shapes for the peers."""

BS = (1, 2, 4, 8, 16, 32)
HEADS = (8, 16, 32, 64, 128)
N = (1, 4, 8, 9, 16, 32, 64)
KV = (21, 1024, 4096, 32768, 128_000, 200_000)

RAGGED = [200_000] + [1024] * 7
"""Contexts of the uneven batch."""

GROWTH_BASE = Shape(4, 16, 16, 32768)
GROWTH = {
    "kv": [GROWTH_BASE._replace(kv=kv) for kv in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 200_000)],
    "bs": [GROWTH_BASE._replace(bs=bs) for bs in BS],
    "heads": [GROWTH_BASE._replace(heads=heads) for heads in HEADS],
    "n": [GROWTH_BASE._replace(n=n) for n in (1, 2, *N[1:3], *N[4:])],
}
"""One axis grows, the others stay."""

POOLS = (1, 8)
POOL_SHAPES = [Shape(1, 8, 9, 32768), Shape(8, 8, 9, 32768)]
"""Timed in a pool that just holds them, and in one eight times that size."""

# Where on an axis to look first: ends and the middle before what lies between.
_ORDER = (
    {v: i for i, v in enumerate((1, 8, 32, 4, 16, 2))},
    {v: i for i, v in enumerate((8, 64, 16, 128, 32))},
    {v: i for i, v in enumerate((9, 64, 16, 1, 8, 32, 4))},
    {v: i for i, v in enumerate((200_000, 32768, 1024, 4096, 128_000, 21))},
)


def _rank(shape: Shape) -> tuple[int, int, Shape]:
    places = [order[value] for order, value in zip(_ORDER, shape, strict=True)]
    return max(places), sum(places), shape


def sweep() -> list[Shape]:
    """Every combination of the four axes: a coarse grid over all of them first, then finer."""
    return sorted((Shape(*values) for values in itertools.product(BS, HEADS, N, KV)), key=_rank)


LARGEST = Shape(max(BS), max(HEADS), max(N), max(KV))
