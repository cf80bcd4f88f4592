// SPDX-License-Identifier: Apache-2.0
// The best-first search of DDTree (arXiv 2604.12989, Algorithm 1), by one warp.
//
// A node is a path of ranks, its score the sum of their log-probabilities, added up from the root in fp32. Candidates
// are the first child of each node and, of each family, the next sibling. The warp takes the best one until the tree is
// full.
//
// Candidates stay in registers, kSlots a lane: a taken one leaves its slot to its next sibling, its first child gets a
// new one. Of equal scores the smaller path wins, in lexicographic order. No paths are compared for that: each
// candidate knows its place in that order. Whatever comes after the one taken differs from it further up, so it comes
// after its child and its sibling too: these two get its place and the next, all behind them move on by one.
#pragma once

#include "device.cuh"
#include "tree/limits.h"
#include "tree/params.h"

namespace tv::tree {

constexpr uint32_t kWarp = 0xffffffffu;

// A float as an integer that sorts like it. 0 is below all of them.
__device__ __forceinline__ uint32_t sort_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_sort_key(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
constexpr uint32_t kImpossible = 0x007fffffu;  // sort_key(-inf)

// Where a node hangs, a byte each.
struct Place {
  uint32_t bits;

  __device__ __forceinline__ static Place make(int parent, int elder, int rank, int level) {
    return {uint32_t(parent | elder << 8 | rank << 16) | uint32_t(level) << 24};
  }
  __device__ __forceinline__ int parent() const { return bits & 255; }
  __device__ __forceinline__ int elder() const { return bits >> 8 & 255; }  // the sibling before it; 0: none
  __device__ __forceinline__ int rank() const { return bits >> 16 & 255; }
  __device__ __forceinline__ int level() const { return bits >> 24; }  // depth - 1
};

// A node that may come next. Slots that hold none have key 0.
struct Candidate {
  uint32_t key;    // of its score
  uint32_t order;  // place among the candidates, then a byte for the number of the slot
  Place place;
  float base;  // score of its parent
};

// In shared memory, without links or nodes below the root before the search starts.
struct Tree {
  float score[kMaxNodes];
  Place place[kMaxNodes];
  int16_t first_child[kMaxNodes], next_sibling[kMaxNodes];  // -1: none
};

// Returns the size of the tree: n, or what has a score above -inf. kSlots * 32 >= n - 1.
template <int kSlots>
__device__ __forceinline__ int grow(const TvTreeParams& p, const float* logprobs, Tree& tree) {
  const int lane = threadIdx.x % 32;
  Candidate slots[kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) slots[j] = {0, uint32_t(32 * j + lane), {0}, 0.0f};
  if (lane == 0) slots[0].key = sort_key(0.0f + logprobs[0]);

  int size = 1;
  for (; size < p.n; ++size) {
    Candidate mine = slots[0];
#pragma unroll
    for (int j = 1; j < kSlots; ++j) {
      const bool tied = slots[j].key == mine.key, first = slots[j].order < mine.order;
      if ((slots[j].key > mine.key) | (tied & first)) mine = slots[j];
    }
    const uint32_t best = __reduce_max_sync(kWarp, mine.key);
    if (best <= kImpossible) break;
    const uint32_t at = __reduce_min_sync(kWarp, mine.key == best ? mine.order : ~0u);
    const Place taken = {__shfl_sync(kWarp, mine.place.bits, int(at % 32))};
    const float base = __shfl_sync(kWarp, mine.base, int(at % 32)), score = from_sort_key(best);

    const int rank = taken.rank(), level = taken.level(), entry = level * p.ranks;
    const uint32_t sibling = rank + 1 < p.ranks ? sort_key(base + logprobs[entry + rank + 1]) : 0;
    const uint32_t child = level + 1 < p.levels ? sort_key(score + logprobs[entry + p.ranks]) : 0;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      Candidate& slot = slots[j];
      if (slot.order == at) slot.key = sibling, slot.place = Place::make(taken.parent(), size, rank + 1, level);
      if (slot.order >= at) slot.order += 256;
      if (32 * j + lane == size) slot = {child, (at & ~255u) | size, Place::make(size, 0, 0, level + 1), score};
    }
    if (lane == 0) {
      tree.score[size] = score, tree.place[size] = taken;
      (rank == 0 ? tree.first_child[taken.parent()] : tree.next_sibling[taken.elder()]) = int16_t(size);
    }
  }
  return size;
}

}  // namespace tv::tree
