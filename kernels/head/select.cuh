// SPDX-License-Identifier: Apache-2.0
// The k best of the candidates that a block holds in registers.
//
// A bound that few candidates reach, but k at least, is found by bisection over the keys: first over the best key of
// each thread, which takes one barrier a step and as a rule leaves hardly more than k; where many reach it all the
// same, over all keys; where too many are equal to the k-th, over their ids too. Those left are then ranked by
// counting. Nothing depends on the order in which threads run.
#pragma once

#include "head/keys.h"

namespace tv::head {

constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kRanked = 512;  // candidates that are ranked at most
static_assert(kRanked >= kMaxTopK);

// What the threads of a block exchange.
template <int kThreads>
struct Exchange {
  int part[kThreads / 32];
  uint32_t best[kThreads / 32];
  float sum[kThreads / 32];
  int count;
  uint64_t ranked[kRanked];
};

template <int kThreads>
__device__ __forceinline__ int block_sum(Exchange<kThreads>& x, int mine) {
  mine = __reduce_add_sync(kFullWarp, mine);
  if (threadIdx.x % 32 == 0) x.part[threadIdx.x / 32] = mine;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) sum += x.part[w];
  __syncthreads();
  return sum;
}

template <int kThreads>
__device__ __forceinline__ float block_sum(Exchange<kThreads>& x, float mine) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) mine += __shfl_xor_sync(kFullWarp, mine, d);
  if (threadIdx.x % 32 == 0) x.sum[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) sum += x.sum[w];
  return sum;  // once a kernel: nobody overwrites it
}

template <int kThreads>
__device__ __forceinline__ uint32_t block_max(Exchange<kThreads>& x, uint32_t mine) {
  mine = __reduce_max_sync(kFullWarp, mine);
  if (threadIdx.x % 32 == 0) x.best[threadIdx.x / 32] = mine;
  __syncthreads();
  uint32_t best = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) best = max(best, x.best[w]);
  return best;  // once a kernel
}

// A bound in low .. high that at least `least` reach: one that at most `most` reach, else the highest there is. At
// least `least` reach `low`. `reach(bound)` counts, the same in all threads.
template <typename Reach>
__device__ __forceinline__ uint32_t raise_bound(uint32_t low, uint32_t high, int least, int most, Reach reach) {
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = high - (high - low) / 2;
    const int n = reach(middle);
    if (n < least) {
      high = middle - 1;
    } else {
      low = middle;
      if (n <= most) break;
    }
  }
  return low;
}

// Calls write(i, candidate) for the i-th best, i < k or as many as there are, each in one thread. `keys` are those of
// the thread, 0: none; `mine` and `top` the best of the thread and of the block. candidate_of(i) reads the candidate
// behind keys[i] again, for the few it is asked for: an index that is not known at compile time would put `keys` into
// memory.
//
// Returns:
//   how many were written, the same in all threads.
template <int kThreads, typename CandidateOf, typename Write>
__device__ __forceinline__ int select(Exchange<kThreads>& x, const uint32_t (&keys)[kEach], uint32_t mine, uint32_t top,
                                      int k, CandidateOf candidate_of, Write write) {
  const auto reaching = [&](uint32_t bound) {  // a bit an entry
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) bits |= uint32_t(keys[i] >= bound) << i;
    return bits;
  };
  uint32_t bound = 1;
  if (__syncthreads_count(mine != 0) >= k) {
    bound = raise_bound(1, top, k, k + k / 4 + 2, [&](uint32_t b) { return __syncthreads_count(mine >= b); });
  }
  uint32_t chosen = reaching(bound);
  int n = block_sum(x, __popc(chosen));
  k = min(k, n);
  if (n > kRanked) {
    bound = raise_bound(bound, top, k, kRanked, [&](uint32_t b) { return block_sum(x, __popc(reaching(b))); });
    chosen = reaching(bound);
    n = block_sum(x, __popc(chosen));
  }
  if (n > kRanked) {  // `bound` is the k-th key
    uint32_t tied = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) tied |= uint32_t(keys[i] == bound) << i;
    chosen &= ~tied;
    const auto lasting = [&](uint32_t last) {  // of those tied, the ones whose complement of the id is that large
      uint32_t bits = 0;
#pragma unroll 1
      for (uint32_t rest = tied; rest != 0; rest &= rest - 1) {
        if (uint32_t(candidate_of(__ffs(rest) - 1)) >= last) bits |= rest & -rest;
      }
      return bits;
    };
    const uint32_t last =
        raise_bound(0, 0xffffffffu, k, k, [&](uint32_t b) { return block_sum(x, __popc(chosen | lasting(b))); });
    chosen |= lasting(last);
  }

  if (threadIdx.x == 0) x.count = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t rest = chosen; rest != 0; rest &= rest - 1) {
    const int at = atomicAdd(&x.count, 1);
    if (at < kRanked) x.ranked[at] = candidate_of(__ffs(rest) - 1);  // more are left only where ids repeat
  }
  __syncthreads();
  n = min(x.count, kRanked);
  for (int at = threadIdx.x; at < n; at += kThreads) {
    const uint64_t it = x.ranked[at];
    int before = 0;
    for (int other = 0; other < n; ++other) before += x.ranked[other] > it || (x.ranked[other] == it && other < at);
    if (before < k) write(before, it);
  }
  return k;
}

}  // namespace tv::head
