# SPDX-License-Identifier: Apache-2.0
"""Estimates, marked as such, for a card nobody has measured: the RTX PRO 6000 Blackwell.

The model: a block gets through its split one pass of the main loop after the other; a pass takes as long as its
slowest resource (matrix products, instruction issue, shared memory), by the counts of the card's own machine code;
blocks come in waves of one a multiprocessor; the batch cannot be read faster than memory allows. What the model leaves
out (latencies, barriers, launch, merging the splits) is taken from a card that was measured: its time over its own
model, shape by shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from treeverify.attention.plan import (
    CHUNK_UNIT,
    KEY_DIM,
    LATENT,
    PORTABLE_ROW_TILE,
    choose_nsplit,
    row_blocks,
    row_tile,
)

from . import roofline
from .sass import MMA_MACS, Loop
from .shapes import BASELINES, Shape
from .store import Row

Loops = Callable[[int], Loop]
"""Main loop of the instance with a row tile."""
ISSUE = 4
"""Instructions a multiprocessor starts in a cycle, on every card from sm_80 on."""
WARPS = 8


class Card(NamedTuple):
    """What the model needs to know of a card."""

    name: str
    sms: int
    clock_ghz: float
    tensor_tflops: float  # bf16 with fp32 sums, dense
    memory_gbs: float

    @property
    def cycles_a_product(self) -> float:
        """Cycles a multiprocessor's tensor cores take for one m16n8k16."""
        return 2 * MMA_MACS * self.sms * self.clock_ghz / (self.tensor_tflops * 1e3)


RTX_PRO_6000 = Card("RTX PRO 6000 Blackwell, estimate", 188, 2.617, 503.8, 1792)
"""NVIDIA's stated figures for the Workstation Edition (RTX Blackwell PRO architecture paper and data sheet): 188
multiprocessors, boost clock 2617 MHz, 503.8 TFLOP/s of dense bf16 with fp32 sums, 1792 GB/s of GDDR7."""


def h200(ceilings: Mapping[str, float]) -> Card:
    """The measured card: its own mma.sync and read rates, 132 multiprocessors at 1.98 GHz (its boost clock)."""
    return Card("H200", 132, 1.98, ceilings["mma_tflops"], ceilings["read_gbs"])


class Model(NamedTuple):
    """The model's answer for one shape."""

    us: float
    bound: str  # what it waits for
    nsplit: int


def model(card: Card, loops: Loops, shape: Shape) -> Model:
    """Time of a step on a card, nothing left out but what the module's text says."""
    tile = row_tile(shape.n * shape.heads, PORTABLE_ROW_TILE)
    loop = loops(tile)
    cycles = {
        "matrix products": loop.mma * WARPS * card.cycles_a_product,
        "instruction issue": loop.all * WARPS / ISSUE,
        "shared memory": loop.shared_cycles * WARPS,
    }
    slowest = max(cycles, key=lambda name: cycles[name])
    nsplit = choose_nsplit(shape.bs, shape.n, shape.heads, card.sms, PORTABLE_ROW_TILE)
    blocks = shape.bs * row_blocks(shape.n, shape.heads, PORTABLE_ROW_TILE) * nsplit
    chunk = math.ceil((shape.kv + shape.n) / nsplit / CHUNK_UNIT) * CHUNK_UNIT
    passes = chunk / loop.positions(WARPS, tile, KEY_DIM + LATENT)
    compute_us = math.ceil(blocks / card.sms) * passes * cycles[slowest] / card.clock_ghz / 1e3
    memory_us = roofline.work(shape.kv_tokens, shape.query_rows, 0).bytes / card.memory_gbs / 1e3
    return Model(max(compute_us, memory_us), slowest if compute_us > memory_us else "memory", nsplit)


def rows(
    loops: Loops, measured_loops: Loops, measured: Mapping[Shape, float], ceilings: Mapping[str, float]
) -> list[Row]:
    """An estimate for each baseline shape.

    Args:
        loops: of the sm_120 code.
        measured_loops: of the code that ran on the measured card.
        measured: its microseconds, by shape.
        ceilings: its rates.
    """
    result: list[Row] = []
    for shape in BASELINES:
        there = model(RTX_PRO_6000, loops, shape)
        row: Row = {**shape._asdict(), "card": RTX_PRO_6000.name, "measured": False, "nsplit": there.nsplit,
                    "model_us": round(there.us, 1), "bound": there.bound, "estimate_us": None}  # fmt: skip
        if shape in measured:
            here = model(h200(ceilings), measured_loops, shape)
            row["left_out_by_the_model"] = round(measured[shape] / here.us, 3)
            row["estimate_us"] = round(there.us * measured[shape] / here.us, 1)
        result.append(row)
    return result
