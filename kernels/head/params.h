// SPDX-License-Identifier: Apache-2.0
// C ABI of the drafting head: the k largest logits of each row and their log-probabilities, in two launches.
//
// overlay/srt/treeverify/ddtree/head_abi.py mirrors these structs field by field; tests/kernels/test_head_abi.py
// compares the two. A *list* stands for a slice of the vocabulary: k candidates (see keys.h), best first, 0 where the
// slice has no more; then, in the low half of one more word, the fp32 sum of exp(logit - base) over the slice, base
// being its largest logit, or 0 where that is infinite. All strides count elements.
#pragma once

#include <stdint.h>

enum TvLogitsDtype { TV_LOGITS_BF16 = 0, TV_LOGITS_FP16 = 1, TV_LOGITS_FP32 = 2 };

typedef struct TvTopkListsParams {
  const void* logits;                   // [rows, vocab], contiguous along the vocabulary
  uint64_t* lists;                      // [rows, lists, k + 1], written; contiguous but for its rows
  int64_t logits_stride, lists_stride;  // from row to row
  int32_t dtype;                        // TvLogitsDtype
  int32_t rows, vocab;
  int32_t first_id;  // token id of column 0
  int32_t count;     // lists a row, at least ceil(vocab / 8192); those past the vocabulary are empty
  int32_t k;
} TvTopkListsParams;

typedef struct TvTopkMergeParams {
  const uint64_t* lists;  // [ranks, rows, lists, k + 1]
  int64_t* ids;     // [rows, k], written: largest logit first, of equal ones the smaller id; -1 past the vocabulary
  float* logprobs;  // [rows, k], written: logit - logsumexp; -inf past the vocabulary
  int32_t ranks, rows;
  int32_t count;  // lists a row and rank
  int32_t k;
} TvTopkMergeParams;

#ifdef __cplusplus
extern "C" {
#endif

// As the entries of ../params.h: 0 or a cudaError_t; they only launch.
int tv_topk_lists(const TvTopkListsParams* params, void* stream);
int tv_topk_merge(const TvTopkMergeParams* params, void* stream);

#ifdef __cplusplus
}
#endif
