# SPDX-License-Identifier: Apache-2.0
"""kernels/index.h, built by g++: splits, chunks, row tiles and mask addresses, and their mirror in plan.py."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from treeverify.attention import cases, plan, reference

SHIM = r"""
#include "index.h"
#include "portable/limits.h"
#include "hopper/shape.cuh"
extern "C" {
int constant(int i) {
  const int all[] = {tv::kLatent, tv::kRope, tv::kKeyDim, tv::kMaxSplits, tv::kMaxTaper, tv::kChunkUnit,
                     tv::kShortestShare, tv::portable::kMaxRowTile, tv::hopper::kMaxRowTile, tv::hopper::kFewRowTile,
                     tv::hopper::kManyRowTile};
  return all[i];
}
int row_tile(int rows, int most) { return tv::row_tile(rows, most); }
bool has_many_rows(int rows) { return tv::hopper::has_many_rows(rows); }
void split_range(int kv, int count, int taper, int s, int* out) {
  const tv::Range r = tv::split_range(kv, {count, taper}, s);
  out[0] = r.begin, out[1] = r.end;
}
int active_splits(int kv, int count, int taper) { return tv::active_splits(kv, {count, taper}); }
void request_lengths(int span, int n, bool unified, int* out) {
  const tv::Lengths l = tv::request_lengths(span, n, unified);
  out[0] = l.kv, out[1] = l.prefix;
}
void byte_mask(bool full, int64_t start, int prefix, int n, int64_t numel, int64_t* out) {
  const tv::ByteMask m = full ? tv::full_mask(start, prefix, n, numel) : tv::qlen_mask(start, n, numel);
  out[0] = m.base, out[1] = m.stride, out[2] = m.fits;
}
uint64_t low_bits(int count) { return tv::low_bits(count); }
uint64_t packed_window(const uint64_t* row, int words, int first) { return tv::packed_window(row, words, first); }
uint64_t causal_word(int i, int w) { return tv::causal_word(i, w); }
bool packed_bit(const uint64_t* row, int j) { return tv::packed_bit(row, j); }
int mask_words(int n) { return tv::mask_words(n); }
}
"""
KV = st.one_of(st.integers(0, 4096), st.integers(0, 2**31 - 4096))


@pytest.fixture(scope="module")
def index(host_build):
    lib = host_build("index", SHIM)
    lib.causal_word.restype = lib.low_bits.restype = lib.packed_window.restype = ctypes.c_uint64
    lib.packed_bit.restype = lib.has_many_rows.restype = ctypes.c_bool
    lib.request_lengths.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_bool, ctypes.c_void_p]
    lib.byte_mask.argtypes = [
        ctypes.c_bool,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return lib


def ints(count: int, kind=ctypes.c_int):
    return (kind * count)()


def test_constants_are_those_of_the_plan(index):
    expected = [plan.LATENT, plan.ROPE, plan.KEY_DIM, plan.MAX_SPLITS, plan.MAX_TAPER, plan.CHUNK_UNIT]
    expected += [plan.SHORTEST_SHARE]
    expected += [plan.PORTABLE_ROW_TILE, plan.HOPPER_ROW_TILE, plan.HOPPER_FEW_ROW_TILE, plan.HOPPER_MANY_ROW_TILE]
    assert [index.constant(i) for i in range(len(expected))] == expected


def cuts(most_taper: int) -> st.SearchStrategy[plan.Cut]:
    counts = st.integers(1, plan.MAX_SPLITS)
    return counts.flatmap(lambda count: st.builds(plan.Cut, st.just(count), st.integers(0, min(count - 1, most_taper))))


@settings(deadline=None)
@given(kv=KV, cut=cuts(plan.MAX_TAPER))
def test_splits_partition_the_kv(index, kv, cut):
    at, active, out, lengths = 0, 0, ints(2), plan.split_lengths(kv, cut)
    for s in range(cut.splits):
        index.split_range(kv, *cut, s, out)
        begin, end = out
        assert max(end - begin, 0) == lengths[s]
        if begin >= end:
            continue
        assert begin == at and active == s, "splits that are not empty come first, in order, without a gap"
        assert begin % plan.CHUNK_UNIT == 0
        at, active = end, active + 1
    assert at == kv
    assert active == index.active_splits(kv, *cut)


@given(kv=KV, cut=cuts(0))
def test_equal_splits_are_shares_in_whole_units(kv, cut):
    units = -(-kv // plan.CHUNK_UNIT)
    longest = max(plan.split_lengths(kv, cut))
    assert -(-longest // plan.CHUNK_UNIT) == -(-units // cut.splits), "no longer than an equal share in whole units"


@given(kv=KV, cut=cuts(plan.MAX_TAPER).filter(lambda cut: cut.taper > 0))
def test_halved_splits(kv, cut):
    """Each of the last is half of the one before, but for the units they start at; a short request has fewer."""
    lengths = plan.split_lengths(kv, cut)
    full = [length for length in lengths if length][:-1]  # the last one takes what is left
    assert all(length >= plan.CHUNK_UNIT for length in full)
    equal = cut.splits - cut.taper
    for s in range(1, len(full)):
        expected = full[s - 1] if s < equal else full[s - 1] / 2
        assert abs(full[s] - expected) <= 1.5 * plan.CHUNK_UNIT
    if kv <= plan.SHORTEST_SHARE * 2**cut.taper:
        assert lengths[0] == kv, "one split, which writes the output itself"


@given(rows=st.integers(1, 256 * 128), most=st.sampled_from([8, 40, 48, 72, 128]))
def test_row_tile(index, rows, most):
    tile = index.row_tile(rows, most)
    assert tile == plan.row_tile(rows, most)
    assert tile % 8 == 0 and 8 <= tile <= most
    blocks = -(-rows // tile)
    assert blocks == -(-rows // most), "no more blocks than the largest tile needs"
    assert plan.has_many_rows(rows, most) or blocks == plan.row_blocks(rows, 1, most)
    assert blocks * tile - rows < 8 * blocks, "tiles are filled evenly"


@given(rows=st.integers(1, 256 * 128))
def test_an_instance_that_holds_the_tile_needs_no_more_blocks(index, rows):
    """The Hopper path has four row tiles: the next one up serves, in as many blocks; many rows get another kernel."""
    assert index.has_many_rows(rows) == plan.has_many_rows(rows, plan.HOPPER_ROW_TILE)
    if index.has_many_rows(rows):
        assert -(-rows // plan.HOPPER_MANY_ROW_TILE) == plan.row_blocks(rows, 1, plan.HOPPER_ROW_TILE)
        return
    tiles = (16, 32, plan.HOPPER_FEW_ROW_TILE, plan.HOPPER_ROW_TILE)
    instance = next(tile for tile in tiles if tile >= index.row_tile(rows, plan.HOPPER_ROW_TILE))
    assert -(-rows // instance) == plan.row_blocks(rows, 1, plan.HOPPER_ROW_TILE)


@given(rows=st.integers(1, 256 * 128))
def test_and_so_on_a_pool_of_fp8(index, rows):
    """Three row tiles, and no kernel for many rows."""
    tiles = (32, 48, plan.HOPPER_ROW_TILE)
    instance = next(tile for tile in tiles if tile >= index.row_tile(rows, plan.HOPPER_ROW_TILE))
    assert -(-rows // instance) == plan.row_blocks(rows, 1, plan.HOPPER_ROW_TILE, many_rows=False)


@given(prefix=st.integers(0, 2**30), n=st.integers(1, 256), unified=st.booleans())
def test_request_lengths(index, prefix, n, unified):
    out = ints(2)
    index.request_lengths(prefix + n if unified else prefix, n, unified, out)
    assert list(out) == [prefix + n, prefix]


@pytest.mark.parametrize("n", [1, 9, 64, 65])
def test_padding_has_no_kv(index, n):
    out = ints(2)
    index.request_lengths(0, n, True, out)
    assert list(out) == [0, 0]


@settings(deadline=None, max_examples=50)
@given(data=st.data(), n=st.integers(1, 130), full=st.booleans())
def test_byte_mask_addresses(index, data, n, full):
    prefixes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    trees = cases.random_trees(len(prefixes), n, torch.Generator().manual_seed(n), "cpu")
    mask = cases.byte_mask(trees, prefixes if full else [0] * len(prefixes), torch.uint8)
    start = 0
    for tree, prefix in zip(trees, prefixes, strict=True):
        out = ints(3, ctypes.c_int64)
        index.byte_mask(full, start, prefix, n, mask.numel(), out)
        base, stride, fits = out
        assert fits
        rows = [[bool(mask[base + i * stride + j]) for j in range(n)] for i in (0, n // 2, n - 1)]
        assert rows == tree[[0, n // 2, n - 1]].tolist()
        start += n * (prefix + n if full else n)
    index.byte_mask(full, start - n * (prefixes[-1] + n if full else n), prefixes[-1], n, mask.numel() - 1, out)
    assert not out[2], "one entry short is not inside the tensor"
    index.byte_mask(full, -1, prefixes[-1], n, mask.numel(), out)
    assert not out[2]


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256])
def test_packed_words(index, n):
    words = index.mask_words(n)
    assert words == plan.mask_words(n)
    packed = reference.pack_mask(reference.causal(n))
    assert packed.shape == (n, words)
    assert [[index.causal_word(i, w) for w in range(words)] for i in range(n)] == [
        [v % 2**64 for v in row] for row in packed.tolist()
    ]
    tree = cases.random_trees(1, n, torch.Generator().manual_seed(n), "cpu")[0]
    packed = reference.pack_mask(tree)
    assert torch.equal(reference.unpack_mask(packed, n), tree)
    rows = [[index.packed_bit(ctypes.c_void_p(packed[i].data_ptr()), j) for j in range(n)] for i in range(n)]
    assert rows == tree.tolist()


@given(count=st.integers(-200, 200))
def test_low_bits(index, count):
    assert index.low_bits(count) == (1 << min(max(count, 0), 64)) - 1


@settings(deadline=None)
@given(n=st.integers(1, 256), first=st.integers(-200, 300), seed=st.integers(0, 2**30))
def test_packed_window(index, n, first, seed):
    row = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)).bool()
    padded = torch.zeros(1, index.mask_words(n) * 64, dtype=torch.bool)
    padded[0, :n] = row
    words = (padded.view(-1, 64).long() << torch.arange(64)).sum(1)
    window = index.packed_window(ctypes.c_void_p(words.data_ptr()), len(words), first)
    expected = [j < 0 or (j < n and bool(row[j])) for j in range(first, first + 64)]
    assert [bool(window >> k & 1) for k in range(64)] == expected
