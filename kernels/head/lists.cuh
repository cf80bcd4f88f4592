// SPDX-License-Identifier: Apache-2.0
// The first launch: a block reads a slice of a row of logits once, into registers, and leaves its list.
//
// Which logits a thread adds up depends on their column only, so a row gives the same bits wherever it lies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "basic_ptx.cuh"
#include "head/params.h"
#include "head/select.cuh"

namespace tv::head {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(float x) { return x; }

template <typename T>
struct Slice {
  static constexpr int kWidth = 16 / sizeof(T);  // logits of one load
  const T* row;
  int begin, vocab;

  __device__ __forceinline__ Slice(const TvTopkListsParams& p)
      : row(static_cast<const T*>(p.logits) + int64_t(blockIdx.y) * p.logits_stride),
        begin(int(blockIdx.x) * kSlice + int(threadIdx.x) * kWidth),
        vocab(p.vocab) {}

  // The column behind keys[i] of this thread.
  __device__ __forceinline__ int column(int i) const {
    return begin + i / kWidth * (kListThreads * kWidth) + i % kWidth;
  }

  __device__ __forceinline__ void load(uint32_t (&keys)[kEach]) const {
    union Loads {
      uint4 words[kEach / kWidth];
      T logits[kEach];
      __device__ __forceinline__ Loads() {}
    } loads;
    if (reinterpret_cast<uintptr_t>(row) % 16 == 0 && vocab % kWidth == 0) {
#pragma unroll
      for (int v = 0; v < kEach / kWidth; ++v) {
        const int at = column(v * kWidth);
        loads.words[v] = at < vocab ? *reinterpret_cast<const uint4*>(row + at) : uint4{0, 0, 0, 0};
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) loads.logits[i] = column(i) < vocab ? row[column(i)] : T(0.0f);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = key_of(widen(loads.logits[i]));
    if (int64_t(blockIdx.x + 1) * kSlice <= vocab) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = column(i) < vocab ? keys[i] : 0;
  }

  // The candidate behind keys[i], read again.
  __device__ __forceinline__ uint64_t at(int i, int first_id) const {
    return candidate(key_of(widen(row[column(i)])), first_id + column(i));
  }
};

// Block (x, y) makes list x of row y.
template <typename T>
__device__ __forceinline__ void make_list(const TvTopkListsParams& p, Exchange<kListThreads>& x) {
  uint64_t* list = p.lists + int64_t(blockIdx.y) * p.lists_stride + int64_t(blockIdx.x) * (p.k + 1);
  int written = 0;
  float sum = 0;
  if (int64_t(blockIdx.x) * kSlice < p.vocab) {
    const Slice<T> slice(p);
    uint32_t keys[kEach], mine = 0;
    slice.load(keys);
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine = max(mine, keys[i]);
    const uint32_t top = block_max(x, mine);
    const float base = exponent_base(logit_of(top));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float logit = fmaxf(logit_of(keys[i]), -INFINITY);  // none is NaN here, and adds 0; NaN is in `base`
      sum += exp2_approx((logit - base) * kLog2e);
    }
    sum = block_sum(x, sum);
    written = select(
        x, keys, mine, top, p.k, [&](int i) { return slice.at(i, p.first_id); },
        [&](int i, uint64_t found) { list[i] = found; });
  }
  for (int i = written + threadIdx.x; i < p.k; i += kListThreads) list[i] = 0;
  if (threadIdx.x == 0) {
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    list[p.k] = bits;
  }
}

}  // namespace tv::head
