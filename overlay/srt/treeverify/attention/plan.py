# SPDX-License-Identifier: Apache-2.0
"""Launch geometry of a verify step, decided on the host once per (batch size, width, heads) bucket.

The numbers mirror kernels/index.h; tests/kernels/test_index.py compares the two.
"""

from __future__ import annotations

LATENT = 512
ROPE = 64
KEY_DIM = LATENT + ROPE
MAX_ROW_TILE = 40
MAX_SPLITS = 256
DEFAULT_SM_COUNT = 64

MAX_Q = 256
"""Widest draft, in tokens a request, that the kernels and buffers are sized and tested for."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def mask_words(n: int) -> int:
    """64-bit words that one row of a packed mask takes for `n` draft tokens."""
    return _ceil_div(n, 64)


def row_tile(rows: int) -> int:
    """Query rows (token, head) one block handles for a request with `rows` of them; a multiple of 8."""
    blocks = _ceil_div(rows, MAX_ROW_TILE)
    return _ceil_div(_ceil_div(rows, blocks), 8) * 8


def choose_nsplit(bs: int, n: int, heads: int, sm_count: int = 0) -> int:
    """How many splits the KV of each request gets, so that one wave of blocks fills the GPU.

    Args:
        bs: requests in the captured bucket.
        n: draft tokens a request.
        heads: local query heads.
        sm_count: multiprocessors of the GPU, 0 where unknown.
    """
    rows = n * heads
    blocks = max(1, bs) * _ceil_div(rows, row_tile(rows))
    return max(1, min(MAX_SPLITS, (sm_count or DEFAULT_SM_COUNT) // blocks))


def workspace_floats(tokens: int, heads: int, nsplit: int) -> int:
    """fp32 elements mla_verify needs for `tokens` query tokens: partial outputs and their log-sum-exps."""
    return tokens * heads * nsplit * (LATENT + 1) if nsplit > 1 else 0
