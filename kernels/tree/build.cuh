// SPDX-License-Identifier: Apache-2.0
// One block builds the draft tree of one request: all threads look for what is no log-probability, the first warp
// searches (grow.cuh), all threads write.
#pragma once

#include "tree/grow.cuh"

namespace tv::tree {

// Every element of the request's outputs. Padding repeats the root, sees itself and the root, and is linked to nothing.
__device__ __forceinline__ void write_tree(const TvTreeParams& p, int b, const Tree& tree, int size) {
  const int64_t root = p.root[b], prefix = load_index(p.prefix_lens, p.prefix_len_bytes, b);
  const int64_t* ids = p.ids + int64_t(b) * p.levels * p.ranks;
  for (int i = threadIdx.x; i < p.n; i += kThreads) {
    const int64_t at = int64_t(b) * p.n + i;
    const Place place = tree.place[i];
    const bool drafted = i > 0 && i < size;
    const int depth = drafted ? place.level() + 1 : 0;
    p.tokens[at] = drafted ? ids[place.level() * p.ranks + place.rank()] : root;
    p.positions[at] = prefix + depth;
    p.parents[at] = drafted ? place.parent() : -1;
    p.depths[at] = depth;
    p.next_token[at] = tree.first_child[i];
    p.next_sibling[at] = tree.next_sibling[i];
    p.scores[at] = i < size ? tree.score[i] : -INFINITY;
  }
  const int words = mask_words(p.n);
  for (int at = threadIdx.x; at < p.n * words; at += kThreads) {
    const int i = at / words, w = at % words;
    uint64_t seen = w == 0;
    for (int j = i; j > 0 && j >= 64 * w; j = tree.place[j].parent()) {
      if (j / 64 == w) seen |= uint64_t(1) << j % 64;
    }
    p.mask[int64_t(b) * p.n * words + at] = seen;
  }
}

__device__ __forceinline__ void build_block(const TvTreeParams& p) {
  __shared__ Tree tree;
  __shared__ int grown;
  const int b = blockIdx.x, entries = p.levels * p.ranks;
  const float* logprobs = p.logprobs + int64_t(b) * entries;

  bool wrong = false;  // NaN or +inf
#pragma unroll 4
  for (int i = threadIdx.x; i < entries; i += kThreads) wrong |= !(logprobs[i] < INFINITY);
  for (int i = threadIdx.x; i < p.n; i += kThreads) {
    tree.first_child[i] = tree.next_sibling[i] = -1;
    tree.score[i] = 0, tree.place[i] = {0};
  }
  wrong = __syncthreads_or(wrong);

  if (threadIdx.x < 32) {
    int size = 1;
    if (!wrong) size = p.n <= 65 ? grow<2>(p, logprobs, tree) : grow<kMaxNodes / 32>(p, logprobs, tree);
    if (threadIdx.x == 0) grown = size, p.sizes[b] = wrong ? -1 : size;
  }
  __syncthreads();
  write_tree(p, b, tree, grown);
}

}  // namespace tv::tree
