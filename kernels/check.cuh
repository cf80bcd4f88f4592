// SPDX-License-Identifier: Apache-2.0
// The checks of check.h: a block a request, a thread a position.
#pragma once

#include "device.cuh"

namespace tv {

constexpr int kCheckThreads = 256;

__device__ inline void stop(int request, const char* what, int64_t at, int64_t found, int64_t end) {
  printf("treeverify: request %d: %s %lld is %lld, expected 0 <= it < %lld\n", request, what,
         static_cast<long long>(at), static_cast<long long>(found), static_cast<long long>(end));
  __trap();
}

__device__ inline bool is_outside(int64_t value, int64_t end) { return value < 0 || value >= end; }

__device__ inline void check_verify(const TvVerifyParams& p) {
  const int b = blockIdx.x, thread = threadIdx.x;
  const int64_t q0 = load_index(p.qo_indptr, p.qo_index_bytes, b), kv0 = p.kv_indptr[b];
  const int64_t q1 = load_index(p.qo_indptr, p.qo_index_bytes, b + 1), kv1 = p.kv_indptr[b + 1];
  if (q0 < 0 || is_outside(q1 - q0, int64_t(p.max_q) + 1)) {
    if (thread == 0) stop(b, "draft width, from row", q0, q1 - q0, int64_t(p.max_q) + 1);
    return;
  }
  if (kv0 < 0 || kv1 < kv0) {
    if (thread == 0) stop(b, "KV length, from entry", kv0, kv1 - kv0, INT32_MAX);
    return;
  }
  for (int64_t i = kv0 + thread; i < kv1; i += kCheckThreads) {
    const int64_t slot = load_index(p.kv_indices, p.kv_index_bytes, i);
    if (is_outside(slot, p.slots)) stop(b, "slot of KV position", i - kv0, slot, p.slots);
  }
  if (p.out_cache_loc == nullptr) return;
  for (int64_t i = q0 + thread; i < q1 && i < p.tokens; i += kCheckThreads) {
    if (is_outside(p.out_cache_loc[i], p.slots)) stop(b, "slot of draft row", i - q0, p.out_cache_loc[i], p.slots);
  }
}

__device__ inline void check_prep(const TvPrepParams& p) {
  const int b = blockIdx.x;
  if (threadIdx.x != 0) return;
  const int64_t row = p.req_pool_indices[b], len = load_index(p.seq_lens, p.seq_len_bytes, b);
  if (is_outside(row, p.rows)) stop(b, "row of req_to_token, entry", b, row, p.rows);
  if (is_outside(len, p.row_stride + 1)) stop(b, "length, entry", b, len, p.row_stride + 1);
}

}  // namespace tv
