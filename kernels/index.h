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
constexpr int kChunkUnit = 64;            // KV positions: splits start at multiples of it, a tile of any path fits in
constexpr int kMaxSplits = 256;           // splits of one request that the combine kernel merges
constexpr int kShortestShare = 3 * kChunkUnit;  // of halved splits
constexpr int kMaxTaper = 8;                    // of a request's splits, those that are halved
constexpr int kCombinePieces = 4;               // of a row's latent, a warp each in the combine kernel: 16 bytes a lane

TV_HD int ceil_div(int a, int b) { return a / b + (a % b != 0); }

// Query rows a block handles when a request has `rows` of them: as few blocks of at most `most` as possible, evenly
// filled, a multiple of 8.
TV_HD int row_tile(int rows, int most) {
  const int blocks = ceil_div(rows, most);
  return ceil_div(ceil_div(rows, blocks), 8) * 8;
}

struct Range {
  int begin, end;
};

// How the KV of a request is cut: into `splits`, of which each of the last `taper` is half as long as the one
// before it, so that a last wave of short blocks fills the multiprocessors that the long ones leave idle. 0 <= taper <
// splits.
struct Cut {
  int splits, taper;
};

// Where split s begins, in shares: the shortest split is one share.
TV_HD int64_t shares_before(Cut cut, int s) {
  const int whole = s < cut.splits - cut.taper ? s : cut.splits - cut.taper;
  return (int64_t(whole + 1) << cut.taper) - (1 << (cut.taper - (s - whole)));
}

// KV positions of a share. Equal splits are whole units; halved ones start at whole units, and a short request
// has fewer: blocks of less than kShortestShare take most of their time to start and end.
TV_HD int share_len(int kv_len, Cut cut) {
  const int len = ceil_div(kv_len, int(shares_before(cut, cut.splits)));
  if (cut.taper == 0) return ceil_div(len, kChunkUnit) * kChunkUnit;
  return len > kShortestShare ? len : kShortestShare;
}

// Positions [begin, end) of split s; begin >= end where the split is empty.
TV_HD Range split_range(int kv_len, Cut cut, int s) {
  const int64_t len = share_len(kv_len, cut);
  int at[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t start = (len * shares_before(cut, s + i) + kChunkUnit - 1) / kChunkUnit * kChunkUnit;
    at[i] = int(start < kv_len ? start : kv_len);
  }
  return {at[0], at[1]};
}

// Splits that are not empty; they come first.
TV_HD int active_splits(int kv_len, Cut cut) {
  if (kv_len <= 0) return 0;
  const int64_t len = share_len(kv_len, cut), last = (kv_len - 1) / kChunkUnit * kChunkUnit;  // where splits may start
  const int64_t equal = last / (len << cut.taper) + 1;
  int active = int(equal < cut.splits - cut.taper ? equal : cut.splits - cut.taper);
  while (active < cut.splits && len * shares_before(cut, active) <= last) ++active;
  return active;
}

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

// The lowest `count` bits, count of any sign and size.
TV_HD uint64_t low_bits(int count) { return count <= 0 ? 0 : count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1; }

// Row i of a causal mask, word w: nodes 0 .. i are visible.
TV_HD uint64_t causal_word(int i, int w) { return low_bits(i + 1 - 64 * w); }

TV_HD bool packed_bit(const uint64_t* row, int j) { return (row[j >> 6] >> (j & 63)) & 1; }

// Bits first .. first + 63 of a packed mask row of `words` words. Bits before 0 are the prefix: set. Bits past the row
// are clear.
TV_HD uint64_t packed_window(const uint64_t* row, int words, int first) {
  if (first < 0) return first <= -64 ? ~uint64_t(0) : (row[0] << -first) | low_bits(-first);
  const int w = first >> 6, shift = first & 63;
  const uint64_t low = w < words ? row[w] >> shift : 0;
  return shift && w + 1 < words ? low | row[w + 1] << (64 - shift) : low;
}

}  // namespace tv
