// SPDX-License-Identifier: Apache-2.0
// The C ABI of the draft tree: built before a verify step, walked after it. overlay/srt/treeverify/ddtree/abi.py
// mirrors these structs field by field (tests/kernels/test_tree_abi.py).
//
// Arrays are contiguous. Node 0 of a tree is its root; nodes stand in the order in which they were taken, so that links
// lead to greater numbers. bs requests, n nodes, L levels (drafted positions), K ranks (candidates of a position).
#pragma once

#include <stdint.h>

typedef struct TvTreeParams {
  const float* logprobs;    // [bs, L, K], descending along K
  const int64_t* ids;       // [bs, L, K], the tokens they belong to
  const int64_t* root;      // [bs], the bonus tokens
  const void* prefix_lens;  // [bs], int32 or int64: the roots' positions
  int64_t* tokens;          // [bs, n], here and below: written
  int64_t* positions;       // [bs, n]
  int32_t* parents;         // [bs, n], -1 for the root and for padding
  int32_t* depths;          // [bs, n]
  uint64_t* mask;           // [bs, n, ceil(n / 64)], as TV_MASK_PACKED
  int64_t* next_token;      // [bs, n], first child or -1
  int64_t* next_sibling;    // [bs, n], next child of the same parent or -1
  float* scores;            // [bs, n], -inf for padding
  int32_t* sizes;           // [bs], nodes that are not padding; -1: logprobs that are none, the root stands alone
  int32_t prefix_len_bytes;
  int32_t bs, n, levels, ranks;  // n 1 .. 256, levels and ranks 1 .. 255
} TvTreeParams;

typedef struct TvWalkParams {
  const int64_t* tokens;        // [bs, n]
  const int64_t* next_token;    // [bs, n]
  const int64_t* next_sibling;  // [bs, n]
  const int32_t* sizes;         // [bs]
  const int64_t* predicted;     // [bs, n], the target's own token after each node
  int64_t* result;              // [bs, 2 * levels + 4]: accepted, size, levels + 1 nodes, levels + 1 tokens
  int32_t bs, n, levels;
} TvWalkParams;

#ifdef __cplusplus
extern "C" {
#endif

// These return 0 or a cudaError_t; they only launch, never allocate or synchronise.
int tv_tree_build(const TvTreeParams* params, void* stream);
int tv_tree_walk(const TvWalkParams* params, void* stream);

#ifdef __cplusplus
}
#endif
