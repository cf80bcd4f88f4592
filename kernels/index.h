// SPDX-License-Identifier: Apache-2.0
// The integer arithmetic of a verify step: which rows a block owns, which KV positions a split covers, where a mask
// entry lies. Host and device share it, so that it is tested on the CPU (tests/kernels/test_index.py).
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define TV_HD __host__ __device__ __forceinline__
#else
#define TV_HD inline
#endif

namespace tv {

constexpr int kLatent = 512;              // width of V and of the non-rotary part of K
constexpr int kRope = 64;                 // width of the rotary part of K
constexpr int kKeyDim = kLatent + kRope;  // row of the pool
constexpr int kTile = 32;                 // KV positions a step of the main loop
constexpr int kMinChunk = 64;             // shortest stretch of KV worth a split
constexpr int kMaxRowTile = 40;           // query rows (token, head) a block, multiple of 8
constexpr int kMaxSplits = 256;           // splits the combine kernel merges

TV_HD int ceil_div(int a, int b) { return a / b + (a % b != 0); }

// Query rows a block handles when a request has `rows` of them: as few blocks as possible, evenly filled.
TV_HD int row_tile(int rows) {
  const int blocks = ceil_div(rows, kMaxRowTile);
  return ceil_div(ceil_div(rows, blocks), 8) * 8;
}

struct Range {
  int begin, end;
};

// KV positions a split takes: an equal share, rounded up to whole tiles.
TV_HD int chunk_len(int kv_len, int nsplit) {
  const int share = ceil_div(ceil_div(kv_len, nsplit), kTile) * kTile;
  return share < kMinChunk ? kMinChunk : share;
}

// Positions [begin, end) of split s; begin >= end where the split is empty.
TV_HD Range split_range(int kv_len, int nsplit, int s) {
  const int64_t begin = int64_t(s) * chunk_len(kv_len, nsplit);
  const int64_t end = begin + chunk_len(kv_len, nsplit);
  return {int(begin < kv_len ? begin : kv_len), int(end < kv_len ? end : kv_len)};
}

// Splits that are not empty; they come first.
TV_HD int active_splits(int kv_len, int nsplit) { return kv_len > 0 ? ceil_div(kv_len, chunk_len(kv_len, nsplit)) : 0; }

// Lengths of one request. A request without KV entries is padding, whatever its draft width.
struct Lengths {
  int kv;      // prefix + draft
  int prefix;  // always visible
};

TV_HD Lengths request_lengths(int kv_span, int n, bool unified) {
  const int kv = unified ? kv_span : kv_span + n;
  return {kv, kv > n ? kv - n : 0};
}

TV_HD int mask_words(int n) { return ceil_div(n, 64); }

// Where the byte mask of a request starts, and whether all of it lies inside the tensor.
struct ByteMask {
  int64_t base;    // entry (row 0, draft column 0)
  int64_t stride;  // entries from row to row
  bool fits;
};

TV_HD ByteMask full_mask(int64_t start, int prefix, int n, int64_t numel) {
  const int64_t stride = int64_t(prefix) + n;
  return {start + prefix, stride, start >= 0 && start + stride * n <= numel};
}

TV_HD ByteMask qlen_mask(int64_t start, int n, int64_t numel) {
  return {start, n, start >= 0 && start + int64_t(n) * n <= numel};
}

// Row i of a causal mask, word w: nodes 0 .. i are visible.
TV_HD uint64_t causal_word(int i, int w) {
  const int bits = i + 1 - 64 * w;
  return bits <= 0 ? 0 : bits >= 64 ? ~uint64_t(0) : (uint64_t(1) << bits) - 1;
}

TV_HD bool packed_bit(const uint64_t* row, int j) { return (row[j >> 6] >> (j & 63)) & 1; }

}  // namespace tv
