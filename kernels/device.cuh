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

  __device__ __forceinline__ bool visible(int i, int j) const {
    if (kind == TV_MASK_NONE) return j <= i;
    if (kind == TV_MASK_PACKED) return packed_bit(words + int64_t(i) * row_words, j);
    return bytes[i * stride + j] != 0;
  }
};

// Partial results: [rows, nsplit, 512] outputs, then [rows, nsplit] base-2 log-sum-exps, for the rows that requests can
// cover. Rows past them get zeros and need no partials.
struct Workspace {
  float* out;
  float* lse;
  int nsplit;

  __device__ __forceinline__ explicit Workspace(const TvVerifyParams& p) {
    nsplit = p.nsplit;
    out = p.workspace;
    lse = out + int64_t(min(p.tokens, p.bs * p.max_q)) * p.heads * nsplit * kLatent;
  }
  __device__ __forceinline__ float* partial(int64_t row, int split) const {
    return out + (row * nsplit + split) * kLatent;
  }
  __device__ __forceinline__ float* partial_lse(int64_t row, int split) const { return lse + row * nsplit + split; }
};

}  // namespace tv
