# SPDX-License-Identifier: Apache-2.0
"""attention/plan.py: how many splits a bucket gets, what its workspace takes, how a ragged batch shares splits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from treeverify.attention import plan

MIB = 1 << 20
CARDS = [132, 188]
"""Multiprocessors of an H200 and of an RTX PRO 6000."""
ROW_TILES = [40, plan.PORTABLE_ROW_TILE, 64, plan.HOPPER_ROW_TILE]


@pytest.mark.parametrize(
    ("bs", "n", "heads", "sms", "most", "nsplit"),
    [
        (1, 9, 8, 132, 72, 132),  # one block a split
        (1, 9, 8, 132, 48, 66),  # two
        (1, 9, 8, 188, 48, 94),
        (1, 9, 8, 0, 48, 32),  # unknown card
        (8, 9, 8, 132, 72, 16),
        (8, 9, 64, 132, 72, 5),
        (8, 9, 64, 132, 48, 4),  # 96 blocks would leave 27 % idle: 2.9 waves of a quarter of the length
        (8, 64, 64, 132, 48, 2),  # 688 blocks: 5.2 waves, or 10.4 of half the length
        (32, 64, 128, 132, 72, 1),
        (1, 1, 1, 512, 72, 256),  # no more than combine merges
        (4096, 1, 8, 132, 72, 1),
    ],
)
def test_nsplit(bs, n, heads, sms, most, nsplit):
    assert plan.choose_nsplit(bs, n, heads, sms, most) == nsplit


@given(
    bs=st.integers(1, 64),
    n=st.integers(1, plan.MAX_Q),
    heads=st.integers(1, plan.MAX_HEADS),
    sms=st.sampled_from(CARDS),
    most=st.sampled_from(ROW_TILES),
)
@settings(deadline=None)
@example(bs=1, n=256, heads=128, sms=188, most=72)
def test_no_multiprocessor_idles_where_a_split_would_fit(bs, n, heads, sms, most):
    nsplit = plan.choose_nsplit(bs, n, heads, sms, most)
    blocks = bs * plan.row_blocks(n, heads, most)
    assert 1 <= nsplit <= plan.MAX_SPLITS
    assert nsplit == plan.MAX_SPLITS or blocks * (nsplit + 1) > sms
    assert 4 * plan.workspace_floats(bs, n, heads, bs * nsplit) <= plan.WORKSPACE_LIMIT


@pytest.mark.parametrize(
    ("bs", "heads", "cut"),
    [
        (1, 64, (14, 0)),  # 126 blocks of 132 multiprocessors
        (2, 64, (7, 0)),
        (8, 64, (4, 3)),  # 72 blocks: equal splits would leave a fifth idle
        (4, 128, (4, 3)),
        (8, 8, (16, 0)),  # not many rows
        (64, 128, (1, 0)),
    ],
)
def test_cut(bs, heads, cut):
    assert plan.choose_cut(bs, 9, heads, 132, 72) == cut
    assert plan.choose_cut(bs, 9, heads, 132, plan.PORTABLE_ROW_TILE).taper == 0


@pytest.mark.parametrize(("bs", "nsplit"), [(1, 16), (4, 4), (8, 2)])
def test_a_path_without_a_kernel_for_many_rows_gets_equal_splits(bs, nsplit):
    """576 rows are 8 blocks of 72, and 128 of 132 multiprocessors have one."""
    assert plan.row_blocks(9, 64, 72, many_rows=False) == 8
    assert plan.choose_cut(bs, 9, 64, 132, 72, many_rows=False) == (nsplit, 0)


@pytest.mark.parametrize("units", [16, 128, 512])
@pytest.mark.parametrize("bs", [*range(1, 13), 16, 32])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_halved_splits_end_no_later_than_equal_ones(heads, bs, units):
    """Blocks one by one, at 6 units beside its positions, 2 where it writes the output itself."""
    cut, rows = plan.choose_cut(bs, 9, heads, 132, 72), plan.row_blocks(9, heads, 72)

    def took(cut: plan.Cut) -> int:
        free = [0] * 132
        lengths = [-(-kv // plan.CHUNK_UNIT) for kv in plan.split_lengths(units * plan.CHUNK_UNIT, cut) if kv]
        for length in lengths:
            for _ in range(bs * rows):
                heapq.heapreplace(free, free[0] + length + (6 if len(lengths) > 1 else 2))
        return max(free)

    assert took(cut) <= 1.05 * took(plan.Cut(plan.choose_nsplit(bs, 9, heads, 132, 72)))


@pytest.mark.parametrize("most", ROW_TILES)
@pytest.mark.parametrize("sms", CARDS)
def test_workspace_bounds(sms, most):
    def mib(bs: int, n: int, heads: int) -> float:
        fixed = bs * plan.choose_cut(bs, n, heads, sms, most).splits
        planned = plan.planned_splits(bs, n, heads, sms, most)
        return max(plan.workspace_floats(bs, n, heads, splits) for splits in (fixed, planned)) * 4 / MIB

    assert mib(8, 9, 64) <= 64
    for bs in range(1, 33):
        for heads in (1, 8, 16, 32, 64, 128):
            for n in (1, 4, 8, 9, 16, 32, 64):
                assert mib(bs, n, heads) <= 256, (bs, n, heads)


def test_workspace_holds_partials_and_lse():
    assert plan.workspace_floats(2, 9, 8, 66) == 66 * 9 * 8 * 513
    assert plan.workspace_floats(2, 9, 8, 2) == 0, "a split each writes the output itself"


LENGTHS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 300_000)), min_size=1, max_size=40)


def units(kv_lens: list[int]) -> list[int]:
    return [-(-kv // plan.CHUNK_UNIT) for kv in kv_lens]


def places(kv_lens: list[int], longest: int) -> int:
    """Places that the batch takes with splits of at most `longest` units."""
    taken, shared = 0, Fraction(0)
    for u in units(kv_lens):
        if 2 * u > longest:
            taken += -(-u // longest)
        else:
            shared += Fraction(u, longest) / (Fraction(3, 4) if 4 * u <= longest else Fraction(1, 2))
    return taken + math.ceil(shared)


def split_at(kv_lens: list[int], most: int) -> list[int]:
    """Splits of at most `most` units, which may all turn out shorter: 121 units at most 12 are eleven of 11."""
    return [max(-(-u // most), 1) for u in units(kv_lens)]


@example(kv_lens=[1, 1, 193, 193, 193, 193, 257, 7681], spare=14)
@given(kv_lens=LENGTHS, spare=st.integers(0, 300))
def test_shares_are_the_best_there_are(kv_lens, spare):
    shares = plan.share_splits(kv_lens, len(kv_lens) + spare)
    assert sum(shares) <= len(kv_lens) + spare and all(1 <= s <= plan.MAX_SPLITS for s in shares)
    longest = max(-(-u // s) for u, s in zip(units(kv_lens), shares, strict=True))
    if any(s > 1 for s in shares):
        made_by = [most for most in range(longest, 2 * longest + 1) if shares == split_at(kv_lens, most)]
        assert min(places(kv_lens, most) for most in made_by) <= spare + 1
    if longest > 1:
        too_many = max(-(-u // (longest - 1)) for u in units(kv_lens)) > plan.MAX_SPLITS
        assert places(kv_lens, longest - 1) > spare + 1 or too_many, "a shorter longest split was possible"


@given(kv_lens=LENGTHS, spare=st.integers(0, 300))
def test_a_plan_gives_every_request_its_share(kv_lens, spare):
    bs, shares = len(kv_lens), plan.share_splits(kv_lens, len(kv_lens) + spare)
    written = plan.planned(kv_lens, bs + spare)
    assert len(written) == plan.plan_size(bs)
    starts, order = written[: bs + 1], written[bs + 1 :]
    assert starts[0] == 0 and sorted(order) == list(range(bs))
    assert [starts[i + 1] - starts[i] for i in range(bs)] == [shares[b] for b in order]
    lengths = [-(-units(kv_lens)[b] // shares[b]) for b in order]
    assert lengths == sorted(lengths, reverse=True)


def makespan(kv_lens: list[int], shares: list[int], order: Iterable[int], blocks: int, sms: int) -> int:
    """Units of time until the last block is done; they start in order, and each costs 2 besides its positions."""
    free = [0] * sms
    for b in order:
        chunk = max(-(-units(kv_lens)[b] // shares[b]), 1)
        for _ in range(shares[b] * blocks):
            heapq.heapreplace(free, free[0] + chunk + 2)
    return max(free)


def fixed(kv_lens: list[int], heads: int, sms: int, most: int) -> int:
    """Makespan with as many splits for each request."""
    bs = len(kv_lens)
    shares = [plan.choose_nsplit(bs, 9, heads, sms, most)] * bs
    return makespan(kv_lens, shares, range(bs), plan.row_blocks(9, heads, most), sms)


def with_plan(kv_lens: list[int], heads: int, sms: int, most: int) -> int:
    """Makespan with the splits shared out."""
    bs = len(kv_lens)
    splits = plan.planned_splits(bs, 9, heads, sms, most)
    if not splits:
        return fixed(kv_lens, heads, sms, most)
    order, shares = plan.planned(kv_lens, splits)[bs + 1 :], plan.share_splits(kv_lens, splits)
    return makespan(kv_lens, shares, order, plan.row_blocks(9, heads, most), sms)


GRIDS = [(132, 72), (132, 48), (188, 48), (188, 72)]
"""Multiprocessors and row tile."""


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(("sms", "most"), GRIDS)
@pytest.mark.parametrize("short", [[1_000] * 7, [20, 300, 1_000, 4_000]])
def test_a_ragged_batch_takes_little_longer_than_its_longest_member(heads, sms, most, short):
    alone = fixed([200_000], heads, sms, most)
    assert with_plan([*short, 200_000], heads, sms, most) <= 1.15 * alone
    assert fixed([*short, 200_000], heads, sms, most) > 2 * alone, "no plan was needed"


@pytest.mark.parametrize(("sms", "most"), GRIDS)
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("bs", [2, 5, 8, 16, 32])
def test_an_even_batch_loses_little_to_the_plan(bs, heads, sms, most):
    kv_lens = [32_768] * bs
    assert with_plan(kv_lens, heads, sms, most) <= 1.1 * fixed(kv_lens, heads, sms, most)


def test_no_plan_for_one_request_or_without_room():
    assert plan.planned_splits(1, 9, 8, 132, 72) == 0
    assert plan.planned_splits(32, 64, 128, 132, 72) == 0, "a split takes 16 MiB"
    assert plan.planned_splits(8, 9, 8, 132, 72) == 132 + 7
