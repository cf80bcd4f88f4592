// SPDX-License-Identifier: Apache-2.0
// What verify and combine share on the device: index loads of either width, the rows a block owns, mask look-ups,
// and where a partial result lies in the workspace.
#pragma once

#include "index.h"
#include "params.h"

namespace tv {

__device__ __forceinline__ int64_t load_index(const void* p, int bytes, int64_t i) {
  return bytes == 8 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

// Programmatic dependent launch: the combine kernel starts while verify still runs and waits before it reads. Only
// verify's own dependent is launched early; verify itself waits for what precedes it in the stream, as any kernel does.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// One request of the batch, read from the device-side index arrays.
struct Request {
  int first_token;  // row of its first draft token in q
  int n;            // draft tokens
  int rows;         // query rows: n * heads, as far as q has them
  int64_t kv_begin;
  Lengths len;

  __device__ __forceinline__ Request(const TvVerifyParams& p, int b) {
    const int64_t q0 = load_index(p.qo_indptr, p.qo_index_bytes, b);
    const int64_t q1 = load_index(p.qo_indptr, p.qo_index_bytes, b + 1);
    kv_begin = p.kv_indptr[b];
    first_token = int(q0);
    n = int(q1 - q0);
    rows = max(min(int(q1), p.tokens) - first_token, 0) * p.heads;
    len = request_lengths(p.kv_indptr[b + 1] - int(kv_begin), n, p.out_cache_loc == nullptr);
  }
};

// Query rows from here on belong to no request.
__device__ __forceinline__ int covered_rows(const TvVerifyParams& p) {
  return min(int(load_index(p.qo_indptr, p.qo_index_bytes, p.bs)), p.tokens) * p.heads;
}

// Which split of which request a block works on.
struct Split {
  int b;      // request; bs where nobody needs this block
  int first;  // number of the request's first split
  Cut cut;    // of the request
  int index;  // the block's place among its splits

  // The work of block `slot` along the split axis. Whole warps call it. Splits of a request are neighbours, unless
  // they differ in length: then the longest of all requests come first.
  __device__ __forceinline__ static Split of_block(const TvVerifyParams& p, int slot) {
    if (p.split_indptr == nullptr) {
      const int bs = max(p.bs, 1), nsplit = max(p.splits / bs, 1), taper = p.taper;
      const int b = taper ? slot % bs : min(slot / nsplit, p.bs);
      return {b, b * nsplit, {nsplit, taper}, taper ? slot / bs : slot - b * nsplit};
    }
    int i = 0;  // requests, in the plan's order, whose splits end at or before `slot`
#pragma unroll 1
    for (int from = 0; from < p.bs; from += 32) {
      const int at = from + threadIdx.x % 32;
      i += __popc(__ballot_sync(0xffffffffu, at < p.bs && p.split_indptr[at + 1] <= slot));
    }
    if (i >= p.bs) return {p.bs, slot, {0, 0}, 0};
    const Split split = of_request(p, i);
    return {split.b, split.first, split.cut, slot - split.first};
  }

  // Number of that block's split, counted over all requests: first + index.
  __device__ __forceinline__ static int number(const TvVerifyParams& p, int slot) {
    return p.taper ? slot % p.bs * (p.splits / p.bs) + slot / p.bs : slot;
  }

  // All splits of the i-th request: in the plan's order where there is one.
  __device__ __forceinline__ static Split of_request(const TvVerifyParams& p, int i) {
    if (p.split_indptr == nullptr) return {i, i * (p.splits / p.bs), {p.splits / p.bs, p.taper}, 0};
    const int first = p.split_indptr[i];
    return {p.split_indptr[p.bs + 1 + i], first, {p.split_indptr[i + 1] - first, 0}, 0};
  }
};

// Every request has one split: blocks write the output themselves, no combine kernel follows, and one more block along
// the split axis answers for rows that no request covers.
TV_HD bool writes_directly(const TvVerifyParams& p) { return p.splits <= p.bs; }

// The mask of one request; kind NONE is causal.
struct Mask {
  int kind;
  const uint64_t* words;  // packed: row 0 of the request
  int row_words;
  const uint8_t* bytes;  // FULL, QLEN: entry (row 0, draft column 0)
  int64_t stride;

  __device__ __forceinline__ Mask(const TvVerifyParams& p, const Request& r, int b) {
    kind = p.mask_kind;
    words = nullptr, bytes = nullptr, row_words = 0, stride = 0;
    if (kind == TV_MASK_PACKED) {
      row_words = p.mask_words;
      words = static_cast<const uint64_t*>(p.mask) + int64_t(b) * p.max_q * row_words;
    } else if (kind != TV_MASK_NONE) {
      const int64_t start = p.mask_indptr ? p.mask_indptr[b] : int64_t(b) * p.max_q * p.max_q;
      const ByteMask m = kind == TV_MASK_FULL ? full_mask(start, r.len.prefix, r.n, p.mask_numel)
                                              : qlen_mask(start, r.n, p.mask_numel);
      bytes = static_cast<const uint8_t*>(p.mask) + m.base;
      stride = m.stride;
      if (!m.fits) kind = TV_MASK_NONE;
    }
  }

  // Nodes first .. first + 63 as row i sees them, a bit each. Nodes before 0 are the prefix: visible. What lies past
  // the request's `n` nodes is meaningless.
  __device__ __forceinline__ uint64_t window(int i, int n, int first) const {
    if (kind == TV_MASK_NONE) return low_bits(i + 1 - first);
    if (kind == TV_MASK_PACKED) return packed_window(words + int64_t(i) * row_words, row_words, first);
    uint64_t bits = low_bits(-first);
#pragma unroll 8
    for (int k = max(0, -first); k < min(64, n - first); ++k) {
      bits |= uint64_t(bytes[i * stride + first + k] != 0) << k;
    }
    return bits;
  }
};

// Partial results of split `slot` (counted over all requests), row `row` of its request: [splits, max_q * heads, 512]
// outputs, then [splits, max_q * heads] base-2 log-sum-exps.
struct Workspace {
  float* out;
  float* lse;
  int64_t rows;

  __device__ __forceinline__ explicit Workspace(const TvVerifyParams& p) {
    rows = int64_t(p.max_q) * p.heads;
    out = p.workspace;
    lse = out + p.splits * rows * kLatent;
  }
  __device__ __forceinline__ float* partial(int slot, int row) const { return out + (slot * rows + row) * kLatent; }
  __device__ __forceinline__ float* partial_lse(int slot, int row) const { return lse + slot * rows + row; }
};

}  // namespace tv
