# SPDX-License-Identifier: Apache-2.0
"""What the bench measures, as an ordered list: a run that is cut off has measured the most telling rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .peers import PEERS
from .shapes import BASELINES, GROWTH, MORE, POOL_SHAPES, POOLS, RAGGED, Shape, sweep

STAGES = ("shapes", "ragged", "growth", "pool", "sweep")

FP8 = "_fp8"
"""Ends the name of a path of ours on an e4m3 pool: the same keys, rounded."""

EVEN, UNEVEN, PLANNED = "even", "ragged", "ragged, planned"
"""Batches: equal contexts; RAGGED's; those, with splits handed out by the plan on the device."""


class Job(NamedTuple):
    """One measurement."""

    impl: str  # a path of ours, or a peer
    shape: Shape
    slots: str = "random"
    batch: str = EVEN
    pool: int | None = None  # size of the pool, as a multiple of what the batch fills; None: the whole pool


def jobs(
    stage: str, paths: Sequence[str], peers: Sequence[str], shapes: Sequence[Shape] | None = None
) -> Iterator[Job]:
    """The measurements of a stage.

    Args:
        shapes: instead of those the stage `shapes` has.
    """
    if stage not in ("shapes", "ragged"):
        paths = [path for path in paths if path.removesuffix(FP8) != "narrow"]  # a few shapes tell enough
    if stage == "shapes":
        for shape in shapes or BASELINES + MORE:
            yield from (Job(path, shape) for path in paths)
            yield from (_peer_job(peer, shape) for peer in peers if shape.kv <= PEERS[peer].longest)
        for shape in shapes or BASELINES:
            yield from (Job(path, shape, "contiguous") for path in paths)
    elif stage == "ragged":
        for heads in (8, 64):
            alone, uneven = Shape(1, heads, 9, max(RAGGED)), Shape(len(RAGGED), heads, 9, max(RAGGED))
            for path in paths:
                yield from (Job(path, alone), Job(path, uneven, batch=UNEVEN), Job(path, uneven, batch=PLANNED))
    elif stage == "growth":
        points = dict.fromkeys(shape for line in GROWTH.values() for shape in line)
        yield from (Job(path, shape) for shape in points for path in paths)
    elif stage == "pool":
        yield from (Job(path, shape, pool=pool) for shape in POOL_SHAPES for path in paths for pool in POOLS)
    elif stage == "sweep":
        for slots in ("random", "contiguous"):
            yield from (Job(path, shape, slots) for shape in sweep() for path in paths)


def _peer_job(peer: str, shape: Shape) -> Job:
    return Job(peer, shape, PEERS[peer].slots)
