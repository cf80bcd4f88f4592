# SPDX-License-Identifier: Apache-2.0
"""The least a verify step must read, write and compute, and what that takes at measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from treeverify.attention.plan import KEY_DIM, LATENT

ELEMENT = 2
"""Bytes of a bf16."""

RATE = {"portable": "mma_tflops", "narrow": "mma_tflops", "hopper": "matmul_tflops"}
"""Ceiling of the arithmetic a path does: a bare mma.sync loop, or a large matrix product."""


class Work(NamedTuple):
    """Of one step: bytes with every input read once and the output written once; flops of the visible pairs."""

    bytes: int
    flops: int


def work(kv_tokens: int, query_rows: int, pairs: int, kv_element: int = ELEMENT) -> Work:
    """Counts of a step.

    Args:
        kv_tokens: positions of the batch, each a row of 576 elements.
        query_rows: (token, head) pairs of the batch, 576 in and 512 out.
        pairs: (query row, position) pairs that the mask lets through.
        kv_element: bytes of an element of the pool.
    """
    moved = kv_tokens * KEY_DIM * kv_element + query_rows * (KEY_DIM + LATENT) * ELEMENT
    return Work(moved, 2 * pairs * (KEY_DIM + LATENT))


def bound_us(step: Work, ceilings: Mapping[str, float], rate: str) -> float:
    """Microseconds of the binding roofline: reading at read_gbs, or computing at ceilings[rate]."""
    return max(step.bytes / ceilings["read_gbs"] / 1e3, step.flops / ceilings[rate] / 1e6)
