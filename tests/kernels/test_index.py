# SPDX-License-Identifier: Apache-2.0
"""kernels/index.h, built by g++: splits, chunks, row tiles and mask addresses."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from treeverify.attention import cases, plan, reference

SHIM = r"""
#include "index.h"
extern "C" {
int constant(int i) {
  const int all[] = {tv::kLatent, tv::kRope, tv::kKeyDim, tv::kMaxRowTile, tv::kMaxSplits, tv::kTile, tv::kMinChunk};
  return all[i];
}
int row_tile(int rows) { return tv::row_tile(rows); }
void split_range(int kv, int nsplit, int s, int* out) {
  const tv::Range r = tv::split_range(kv, nsplit, s);
  out[0] = r.begin, out[1] = r.end;
}
int active_splits(int kv, int nsplit) { return tv::active_splits(kv, nsplit); }
void request_lengths(int span, int n, bool unified, int* out) {
  const tv::Lengths l = tv::request_lengths(span, n, unified);
  out[0] = l.kv, out[1] = l.prefix;
}
void byte_mask(bool full, int64_t start, int prefix, int n, int64_t numel, int64_t* out) {
  const tv::ByteMask m = full ? tv::full_mask(start, prefix, n, numel) : tv::qlen_mask(start, n, numel);
  out[0] = m.base, out[1] = m.stride, out[2] = m.fits;
}
uint64_t causal_word(int i, int w) { return tv::causal_word(i, w); }
bool packed_bit(const uint64_t* row, int j) { return tv::packed_bit(row, j); }
int mask_words(int n) { return tv::mask_words(n); }
}
"""
KV = st.one_of(st.integers(0, 4096), st.integers(0, 2**31 - 4096))


@pytest.fixture(scope="module")
def index(host_build):
    lib = host_build("index", SHIM)
    lib.causal_word.restype = ctypes.c_uint64
    lib.packed_bit.restype = ctypes.c_bool
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
    expected = [plan.LATENT, plan.ROPE, plan.KEY_DIM, plan.MAX_ROW_TILE, plan.MAX_SPLITS]
    assert [index.constant(i) for i in range(5)] == expected


@settings(deadline=None)
@given(kv=KV, nsplit=st.integers(1, plan.MAX_SPLITS))
def test_splits_partition_the_kv(index, kv, nsplit):
    tile, min_chunk, at, active, out = index.constant(5), index.constant(6), 0, 0, ints(2)
    for s in range(nsplit):
        index.split_range(kv, nsplit, s, out)
        begin, end = out
        if begin >= end:
            continue
        assert begin == at and active == s, "splits that are not empty come first, in order, without a gap"
        assert begin % tile == 0 and (end == kv or ((end - begin) % tile == 0 and end - begin >= min_chunk))
        at, active = end, active + 1
    assert at == kv
    assert active == index.active_splits(kv, nsplit)


@given(rows=st.integers(1, 256 * 128))
def test_row_tile(index, rows):
    tile = index.row_tile(rows)
    assert tile == plan.row_tile(rows)
    assert tile % 8 == 0 and 8 <= tile <= plan.MAX_ROW_TILE
    blocks = -(-rows // tile)
    assert blocks == -(-rows // plan.MAX_ROW_TILE), "no more blocks than the largest tile needs"
    assert blocks * tile - rows < 8 * blocks, "tiles are filled evenly"


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


@pytest.mark.parametrize(
    ("bs", "n", "heads", "sms", "nsplit"),
    [
        (1, 9, 8, 132, 66),
        (1, 1, 8, 132, 132),
        (8, 9, 8, 132, 8),
        (8, 9, 64, 132, 1),
        (1, 9, 8, 188, 94),
        (1, 9, 8, 0, 32),
        (1, 1, 1, 512, 256),
    ],
)
def test_nsplit_fills_one_wave(bs, n, heads, sms, nsplit):
    assert plan.choose_nsplit(bs, n, heads, sms) == nsplit


def test_workspace_holds_partials_and_lse():
    assert plan.workspace_floats(9, 8, 66) == 9 * 8 * 66 * 513
    assert plan.workspace_floats(9, 8, 1) == 0
