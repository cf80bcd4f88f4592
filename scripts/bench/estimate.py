# SPDX-License-Identifier: Apache-2.0
"""Estimates, marked as such, for a card nobody has measured: the RTX PRO 6000 Blackwell.

The model: a block gets through its split 16 KV positions a pass, the shape for 99 KB of shared memory; a pass takes as
long as its slower resource, matrix products or shared memory, by what the code issues in a pass (its products are those
of the sm_120 machine code: tests/kernels/test_machine_code.py); blocks come in waves of one a multiprocessor; the batch
cannot be read faster than memory allows. What the model leaves out (latencies, barriers, launch, merging the splits)
is taken from a card that was measured: its time over its own model, shape by shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from .shapes import BASELINES, Shape
from .store import Row

MMA_MACS = 16 * 8 * 16
"""Multiply-adds of one mma.sync m16n8k16."""
WARPS = 8
POSITIONS = 16
"""KV positions of a pass."""
SLICES = 4
"""Of the key dimension, whose partial scores meet in shared memory."""
BANK_BYTES = 128
"""Shared memory, in a cycle."""


class Products(NamedTuple):
    """mma.sync instructions of a warp in a pass."""

    scores: int
    values: int


def products(tile: int) -> Products:
    """Of a block of `tile` query rows: a slice of the scores for half of them, and 64 dimensions of the output."""
    eights = tile // 8
    return Products(KEY_DIM // 16 // SLICES * math.ceil(eights / 2), LATENT // 16 // WARPS * eights)


def shared_bytes(tile: int) -> int:
    """Bytes through shared memory in a pass: the copy, K for each half of the rows, V, partial scores both ways."""
    element = roofline.ELEMENT
    halves = 2 if tile > 8 else 1
    kv = POSITIONS * ((1 + halves) * KEY_DIM + LATENT) * element
    return kv + 2 * SLICES * tile * POSITIONS * 4


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


def model(card: Card, shape: Shape) -> Model:
    """Time of a step on a card, nothing left out but what the module's text says."""
    tile = row_tile(shape.n * shape.heads, PORTABLE_ROW_TILE)
    cycles = {
        "matrix products": sum(products(tile)) * WARPS * card.cycles_a_product,
        "shared memory": shared_bytes(tile) / BANK_BYTES,
    }
    slowest = max(cycles, key=lambda name: cycles[name])
    nsplit = choose_nsplit(shape.bs, shape.n, shape.heads, card.sms, PORTABLE_ROW_TILE)
    blocks = shape.bs * row_blocks(shape.n, shape.heads, PORTABLE_ROW_TILE) * nsplit
    chunk = math.ceil((shape.kv + shape.n) / nsplit / CHUNK_UNIT) * CHUNK_UNIT
    passes = chunk / POSITIONS
    compute_us = math.ceil(blocks / card.sms) * passes * cycles[slowest] / card.clock_ghz / 1e3
    memory_us = roofline.work(shape.kv_tokens, shape.query_rows, 0).bytes / card.memory_gbs / 1e3
    return Model(max(compute_us, memory_us), slowest if compute_us > memory_us else "memory", nsplit)


def rows(measured: Mapping[Shape, float], ceilings: Mapping[str, float]) -> list[Row]:
    """An estimate for each baseline shape.

    Args:
        measured: microseconds of the same shapes of the kernel on the measured card, by shape.
        ceilings: that card's rates.
    """
    result: list[Row] = []
    for shape in BASELINES:
        there = model(RTX_PRO_6000, shape)
        row: Row = {**shape._asdict(), "card": RTX_PRO_6000.name, "measured": False, "nsplit": there.nsplit,
                    "model_us": round(there.us, 1), "bound": there.bound, "estimate_us": None}  # fmt: skip
        if shape in measured:
            here = model(h200(ceilings), shape)
            row["left_out_by_the_model"] = round(measured[shape] / here.us, 3)
            row["estimate_us"] = round(there.us * measured[shape] / here.us, 1)
        result.append(row)
    return result
