// SPDX-License-Identifier: Apache-2.0
// The second launch: the lists of a row, of one rank or of several, become its k largest logits and their
// log-probabilities.
#pragma once

#include "head/params.h"
#include "head/select.cuh"

namespace tv::head {

// The lists of a row, one rank's after the other's.
struct RowLists {
  const uint64_t* first;
  int64_t rank_stride;
  int count, size;  // lists of a rank, words of a list
  int lists;

  __device__ __forceinline__ RowLists(const TvTopkMergeParams& p, int row)
      : first(p.lists + int64_t(row) * p.count * (p.k + 1)),
        rank_stride(int64_t(p.rows) * p.count * (p.k + 1)),
        count(p.count),
        size(p.k + 1),
        lists(p.ranks * p.count) {}

  __device__ __forceinline__ const uint64_t* list(int i) const {
    return first + i / count * rank_stride + i % count * size;
  }
  // Candidate i of all of them.
  __device__ __forceinline__ uint64_t at(int i) const { return list(i / (size - 1))[i % (size - 1)]; }
};

// The part of list i in the sum of exp(logit - base) over the vocabulary.
__device__ __forceinline__ float scaled_sum(const RowLists& lists, int i, float base) {
  const uint64_t* list = lists.list(i);
  if (list[0] == 0) return 0;
  const uint32_t bits = uint32_t(list[lists.size - 1]);
  float sum;
  memcpy(&sum, &bits, sizeof sum);
  return sum * expf(logit_of(key_in(list[0])) - base);  // of nothing but -inf: 0 * 0
}

// Block x merges row x.
template <int kThreads>
__device__ __forceinline__ void merge_row(const TvTopkMergeParams& p, Exchange<kThreads>& x) {
  const int row = blockIdx.x;
  const RowLists lists(p, row);
  uint32_t keys[kEach], mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kThreads + threadIdx.x;
    keys[i] = at < lists.lists * p.k ? key_in(lists.at(at)) : 0;
    mine = max(mine, keys[i]);
  }
  const uint32_t top = block_max(x, mine);
  const float base = exponent_base(logit_of(top));
  float sum = 0;
  for (int i = threadIdx.x; i < lists.lists; i += kThreads) sum += scaled_sum(lists, i, base);
  const float lse = base + logf(block_sum(x, sum));

  int64_t* ids = p.ids + int64_t(row) * p.k;
  float* logprobs = p.logprobs + int64_t(row) * p.k;
  const int written = select(
      x, keys, mine, top, p.k, [&](int i) { return lists.at(i * kThreads + threadIdx.x); },
      [&](int i, uint64_t found) {
        ids[i] = id_in(found);
        logprobs[i] = logit_of(key_in(found)) - lse;
      });
  for (int i = written + threadIdx.x; i < p.k; i += kThreads) ids[i] = -1, logprobs[i] = -INFINITY;
}

}  // namespace tv::head
