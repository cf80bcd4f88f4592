# SPDX-License-Identifier: Apache-2.0
"""Launch geometry of a verify step, decided on the host once per (batch size, width, heads) bucket.

The arithmetic mirrors kernels/index.h and kernels/plan.cu; tests/kernels and tests/gpu compare them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

LATENT = 512
ROPE = 64
KEY_DIM = LATENT + ROPE
CHUNK_UNIT = 64
SHORTEST_SHARE = 3 * CHUNK_UNIT
"""KV positions of the shortest of halved splits, where it is not the last that has any."""
MAX_SPLITS = 256
"""Splits of one request."""
MAX_TAPER = 8
"""Of them, those that may be halved."""
MAX_GRID_SPLITS = 65534
"""Splits of all requests of a batch."""
MAX_PARTIALS = 1 << 25
"""Rows of partial results of all splits that the merge can count; no choice made here comes near."""
MAX_PLANNED_SPLITS = 1024
"""Splits, and so requests, that mla_plan hands out."""
DEFAULT_SM_COUNT = 64
PORTABLE_ROW_TILE = 48
HOPPER_ROW_TILE = 72
HOPPER_FEW_ROW_TILE = 48
"""Row tiles of the Hopper path up to which the kernel for few rows is the faster one."""
HOPPER_MANY_ROW_TILE = 64
"""Of the Hopper kernel for requests of many rows."""

MAX_Q = 256
"""Widest draft, in tokens a request, that the kernels and buffers are sized and tested for."""
MAX_HEADS = 128
"""Most query heads of a rank that they are sized and tested for."""

WORKSPACE_LIMIT = 256 << 20
"""Bytes that no choice of splits makes the workspace exceed."""

# What choose_nsplit minimises, in units of CHUNK_UNIT positions that one block works through.
_NOMINAL_UNITS = 512  # a request of 32k tokens: the host does not know the lengths of the steps to come
_BLOCK_COST = 2  # a block's start and end: queries, first tile, output
_PARTIAL_COST = 4  # its share in partial results, written and read again
_GOOD_ENOUGH = 1.04  # fewer splits are taken where they cost no more than this: less memory, less traffic

# What choose_cut compares halved splits by, for the kernel for many rows, in the same units.
_LENGTHS = (_NOMINAL_UNITS, 128, 16)  # requests of 32k, 8k and 1k tokens
_MERGED_ROWS = 24  # partial rows that a multiprocessor writes and merges in a unit of time
_MOST_CUTS = 8  # splits of a request
_MOST_HALVED = 3  # of them
_MANY_WAVES = 4  # where equal splits leave little idle
_NO_WORSE = 1.02  # at any of the lengths
_CLEARLY_BETTER = 0.95  # over all of them: what the model can tell


class Cut(NamedTuple):
    """How the KV of each request of a batch is split: `Cut` of kernels/index.h."""

    splits: int
    """Splits of a request."""
    taper: int = 0
    """Of them the last, each half as long as the one before it."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def mask_words(n: int) -> int:
    """64-bit words that one row of a packed mask takes for `n` draft tokens."""
    return _ceil_div(n, 64)


def row_tile(rows: int, most: int) -> int:
    """Query rows (token, head) one block handles for a request with `rows` of them: a multiple of 8, at most `most`."""
    blocks = _ceil_div(rows, most)
    return _ceil_div(_ceil_div(rows, blocks), 8) * 8


def has_many_rows(rows: int, most: int, many_rows: bool = True) -> bool:
    """Whether requests of `rows` query rows get the kernel for many rows, of the path with row tiles of at most `most`.

    Args:
        many_rows: whether the Hopper path has one, which it has not for a pool of fp8.
    """
    if not many_rows or most != HOPPER_ROW_TILE or row_tile(rows, most) <= HOPPER_FEW_ROW_TILE:
        return False
    return 3 * _ceil_div(rows, HOPPER_MANY_ROW_TILE) <= 4 * _ceil_div(rows, most)


def row_blocks(n: int, heads: int, max_row_tile: int, many_rows: bool = True) -> int:
    """Blocks that share the query rows of a request."""
    rows = n * heads
    return _ceil_div(rows, HOPPER_MANY_ROW_TILE if has_many_rows(rows, max_row_tile, many_rows) else max_row_tile)


@functools.cache
def choose_nsplit(
    bs: int, n: int, heads: int, sm_count: int = 0, max_row_tile: int = PORTABLE_ROW_TILE, many_rows: bool = True
) -> int:
    """How many splits the KV of each request gets.

    At least so many that their blocks fill one wave, a block a multiprocessor. Beyond that, more splits make the last
    wave fuller, but cost time of their own and memory: of the counts whose workspace stays within WORKSPACE_LIMIT the
    smallest is taken that comes close to the fastest, for requests of equal and ample length.

    Args:
        bs: requests in the captured bucket.
        n: draft tokens a request.
        heads: local query heads.
        sm_count: multiprocessors of the GPU, 0 where unknown.
        max_row_tile: most query rows a block of the path holds.
        many_rows: whether the Hopper path has a kernel for requests of many rows.
    """
    sms, bs = sm_count or DEFAULT_SM_COUNT, max(bs, 1)
    blocks = bs * row_blocks(n, heads, max_row_tile, many_rows)
    most = min(MAX_SPLITS, MAX_GRID_SPLITS // bs, WORKSPACE_LIMIT // (4 * bs * n * heads * (LATENT + 1)))
    least = max(1, min(sms // blocks, most))

    def cost(nsplit: int) -> float:
        waves = _ceil_div(blocks * nsplit, sms)
        return waves * (_NOMINAL_UNITS / nsplit + _BLOCK_COST + (_PARTIAL_COST if nsplit > 1 else 0))

    costs = {nsplit: cost(nsplit) for nsplit in range(least, max(most, least) + 1)}
    return next(nsplit for nsplit, c in costs.items() if c <= _GOOD_ENOUGH * min(costs.values()))


@functools.cache
def choose_cut(
    bs: int, n: int, heads: int, sm_count: int = 0, max_row_tile: int = PORTABLE_ROW_TILE, many_rows: bool = True
) -> Cut:
    """How the KV of each request is split: choose_nsplit's equal splits, or halved ones where they are clearly better.

    Blocks of many rows come in few large splits, whose last wave leaves many multiprocessors idle; a long split each,
    and shorter and shorter ones behind it, fill them. The context is not known, so a choice must hold at _LENGTHS. Only
    the Hopper kernel for many rows is bound by its multiprocessors' work alone, as the model has it; the others get
    equal splits. Arguments as choose_nsplit.
    """
    equal = Cut(choose_nsplit(bs, n, heads, sm_count, max_row_tile, many_rows))
    sms, bs = sm_count or DEFAULT_SM_COUNT, max(bs, 1)
    rows, blocks = bs * n * heads, bs * row_blocks(n, heads, max_row_tile, many_rows)
    if not has_many_rows(n * heads, max_row_tile, many_rows) or blocks > _MANY_WAVES * sms:
        return equal
    most = min(_MOST_CUTS, MAX_GRID_SPLITS // bs, WORKSPACE_LIMIT // (4 * rows * (LATENT + 1)))

    of_equal = [_cost(equal, units, rows, blocks, sms) for units in _LENGTHS]

    def compared(cut: Cut) -> float:
        ratios = []
        for units, cost in zip(_LENGTHS, of_equal, strict=True):
            ratios.append(_cost(cut, units, rows, blocks, sms) / cost)
            if ratios[-1] > _NO_WORSE:
                return math.inf
        return math.prod(ratios) ** (1 / len(ratios))

    halved = [Cut(count, taper) for count in range(2, most + 1) for taper in range(1, min(count, _MOST_HALVED + 1))]
    costs = {cut: compared(cut) for cut in halved}
    best = min(halved, key=lambda cut: costs[cut], default=equal)
    return best if costs.get(best, math.inf) <= _CLEARLY_BETTER else equal


def _cost(cut: Cut, units: int, rows: int, blocks: int, sms: int) -> float:
    """Time of a step of requests of `units` units each, `rows` query rows in all, `blocks` blocks for each split."""
    lengths = [_units(length) for length in split_lengths(units * CHUNK_UNIT, cut) if length]
    if len(lengths) == 1:
        return _makespan([units + _BLOCK_COST], blocks, sms)
    took = _makespan([length + _BLOCK_COST + _PARTIAL_COST for length in lengths], blocks, sms)
    return took + rows * len(lengths) / (_MERGED_ROWS * sms)


def _makespan(durations: Sequence[float], blocks: int, sms: int) -> float:
    """When the last of `blocks` blocks of each duration is done: they start in order, each where one ends first."""
    free = [(0.0, sms)]  # multiprocessors by the time they fall idle
    for duration in durations:
        left = blocks
        while left:
            time, idle = heapq.heappop(free)
            taken = min(left, idle)
            heapq.heappush(free, (time + duration, taken))
            if idle > taken:
                heapq.heappush(free, (time, idle - taken))
            left -= taken
    return max(free)[0]


def split_lengths(kv: int, cut: Cut) -> list[int]:
    """KV positions of each split of a request of `kv`, 0 where it is empty: split_range of kernels/index.h."""
    shares = [2**cut.taper] * (cut.splits - cut.taper) + [2**i for i in reversed(range(cut.taper))]
    share = _ceil_div(kv, sum(shares))
    share = max(share, SHORTEST_SHARE) if cut.taper else _units(share) * CHUNK_UNIT
    starts = [min(_units(share * before) * CHUNK_UNIT, kv) for before in itertools.accumulate(shares, initial=0)]
    return [end - start for start, end in itertools.pairwise(starts)]


@functools.cache
def planned_splits(
    bs: int, n: int, heads: int, sm_count: int = 0, max_row_tile: int = PORTABLE_ROW_TILE, many_rows: bool = True
) -> int:
    """How many splits mla_plan may hand out to `bs` requests; 0 where it would have nothing to choose.

    As many as run in the waves that choose_nsplit would fill, and one more for each request but one (share_splits says
    what for). Arguments as choose_nsplit.
    """
    sms, blocks = sm_count or DEFAULT_SM_COUNT, row_blocks(n, heads, max_row_tile, many_rows)
    waves = _ceil_div(bs * blocks * choose_nsplit(bs, n, heads, sm_count, max_row_tile, many_rows), sms)
    most = min(MAX_PLANNED_SPLITS, WORKSPACE_LIMIT // (4 * n * heads * (LATENT + 1)))
    splits = min(waves * sms // blocks + bs - 1, most)
    return splits if bs > 1 and splits > bs else 0


def share_splits(kv_lens: Sequence[int], splits: int) -> list[int]:
    """Splits of each request, as mla_plan hands them out: at least 1 each, at most `splits` in all.

    The longest split is as short as can be, in units of CHUNK_UNIT, so that all fit into the places that run at once:
    `splits`, less one for each request but one. A split takes a place; requests of at most half the longest split share
    places, filled to three quarters by those of at most a quarter and to a half by the others.
    """
    units = [_units(kv) for kv in kv_lens]
    places = splits - len(units) + 1

    def fits(most: int) -> bool:
        taken = sum(_ceil_div(u, most) for u in units if 2 * u > most)
        shared = sum(u * (4 if 4 * u <= most else 6) for u in units if 2 * u <= most)  # in thirds of a unit
        return taken + _ceil_div(shared, 3 * most) <= places

    low = max(_ceil_div(sum(units), places), _ceil_div(max(units), MAX_SPLITS), 1)
    high = max(low, *units)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return [max(_ceil_div(u, low), 1) for u in units]


def planned(kv_lens: Sequence[int], splits: int) -> list[int]:
    """The plan as mla_plan writes it, 2 * bs + 1 numbers.

    In the order of the plan, longest splits first, the i-th request owns splits plan[i] .. plan[i + 1] and is request
    plan[bs + 1 + i] of the batch.
    """
    shares = share_splits(kv_lens, splits)
    order = sorted(range(len(shares)), key=lambda b: -_ceil_div(_units(kv_lens[b]), shares[b]))
    return [0, *itertools.accumulate(shares[b] for b in order), *order]


def plan_size(bs: int) -> int:
    """int32 elements of a plan for `bs` requests."""
    return 2 * bs + 1


def _units(kv: int) -> int:
    return _ceil_div(max(kv, 0), CHUNK_UNIT)


def workspace_floats(bs: int, n: int, heads: int, splits: int) -> int:
    """fp32 elements mla_verify needs for `splits` splits of `bs` requests: partial outputs and their log-sum-exps."""
    return splits * n * heads * (LATENT + 1) if splits > bs else 0
