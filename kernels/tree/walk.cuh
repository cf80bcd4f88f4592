// SPDX-License-Identifier: Apache-2.0
// One block walks one tree after the target has spoken: from the root to the child that is the target's own token after
// it, and on, until there is none (arXiv 2604.12989, section 4).
#pragma once

#include "tree/limits.h"
#include "tree/params.h"

namespace tv::tree {

// Links lead to greater numbers; what does not ends the walk, whatever it is.
__device__ __forceinline__ int16_t link(int64_t to, int from, int n) {
  return to > from && to < n ? int16_t(to) : int16_t(-1);
}

__device__ __forceinline__ void walk_block(const TvWalkParams& p) {
  __shared__ int64_t token[kMaxNodes], wanted[kMaxNodes];
  __shared__ int16_t first_child[kMaxNodes], next_sibling[kMaxNodes], path[kMaxLevels + 1];
  __shared__ int accepted;
  const int b = blockIdx.x, size = p.sizes[b];
  for (int i = threadIdx.x; i < p.n; i += kThreads) {
    const int64_t at = int64_t(b) * p.n + i;
    token[i] = p.tokens[at], wanted[i] = p.predicted[at];
    first_child[i] = link(p.next_token[at], i, p.n), next_sibling[i] = link(p.next_sibling[at], i, p.n);
  }
  __syncthreads();

  if (threadIdx.x == 0) {
    int steps = 0, node = 0;
    path[0] = 0;
    while (size > 0 && steps < p.levels) {
      const int64_t next = wanted[node];
      node = first_child[node];
      while (node >= 0 && token[node] != next) node = next_sibling[node];
      if (node < 0) break;
      path[++steps] = int16_t(node);
    }
    accepted = steps;
  }
  __syncthreads();

  const int deep = p.levels + 1;
  int64_t* result = p.result + int64_t(b) * (2 * deep + 2);
  if (threadIdx.x == 0) result[0] = accepted, result[1] = size;
  for (int i = threadIdx.x; i < deep; i += kThreads) {
    const bool on = i <= accepted;
    result[2 + i] = on ? path[i] : -1;
    result[2 + deep + i] = on ? wanted[path[i]] : -1;  // the next node's token, at the end the bonus
  }
}

}  // namespace tv::tree
