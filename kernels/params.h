// SPDX-License-Identifier: Apache-2.0
// The C ABI of libtreeverify: plain structs, no torch headers.
//
// overlay/srt/treeverify/attention/abi.py mirrors these structs field by field; tests/kernels/test_abi.py compares
// the two through a host build of this header. All strides count elements; the last dimension of q, kv and out is
// contiguous. "Unified" layout: kv_indices holds prefix and draft slots of a request. "Two-source" layout: kv_indices
// holds the prefix only and out_cache_loc the draft slots. qo_indptr starts at 0 and no request is wider than max_q. A
// padding request has no KV in the unified layout, and no draft tokens (equal qo_indptr entries) in the two-source one,
// where qo_indptr must not lead past `tokens`: the slots of the draft rows are read there.
#pragma once

#include <stdint.h>

// q and out have one of the first two. The pool has the same one, or an fp8 where q is bf16.
enum TvDtype { TV_BF16 = 0, TV_FP16 = 1, TV_FP8_E4M3 = 2, TV_FP8_E5M2 = 3 };

enum TvMaskKind {
  TV_MASK_NONE = 0,    // causal among the draft rows
  TV_MASK_PACKED = 1,  // uint64 [bs, max_q, mask_words], bit j of row i: node i sees node j
  TV_MASK_FULL = 2,    // one byte an entry, per request [n, prefix + n], at mask_indptr[b]
  TV_MASK_QLEN = 3,    // one byte an entry, per request [n, n], at mask_indptr[b] or b * max_q * max_q
};

// Which verify kernel runs. AUTO: Hopper's on sm_90 where q is 16-byte aligned, but for an fp8 pool and requests of no
// more than TV_FEW_ROWS query rows, else the portable one. NARROW: the portable one as it is on cards that give a block
// 99 KB of shared memory, on any card.
enum TvPath { TV_PATH_AUTO = 0, TV_PATH_PORTABLE = 1, TV_PATH_HOPPER = 2, TV_PATH_NARROW = 3 };
enum { TV_FEW_ROWS = 8 };

typedef struct TvVerifyParams {
  const void* q_nope;            // [tokens, heads, 512]
  const void* q_pe;              // [tokens, heads, 64]
  const void* kv;                // [slots, 576]: 512 latent, 64 rope
  const int32_t* kv_indptr;      // [bs + 1]
  const void* kv_indices;        // int32 or int64
  const void* qo_indptr;         // [bs + 1], int32 or int64
  const int64_t* out_cache_loc;  // [tokens] in the two-source layout, else null
  const void* mask;              // see TvMaskKind
  const int64_t* mask_indptr;    // [bs + 1] or null
  void* out;                     // [tokens, heads, 512]
  float* workspace;              // [splits, max_q * heads, 512] partial outputs, then [splits, max_q * heads] lse;
                                 // 16-byte aligned
  const int32_t* split_indptr;   // the plan, see TvPlanParams; null: splits / bs each
  int64_t q_nope_stride_t, q_nope_stride_h;
  int64_t q_pe_stride_t, q_pe_stride_h;
  int64_t kv_stride;
  int64_t out_stride_t, out_stride_h;
  int64_t mask_numel;  // entries behind `mask`; a request whose range does not fit is causal
  int32_t kv_index_bytes, qo_index_bytes;
  int32_t dtype, mask_kind, mask_words;
  int32_t bs, tokens, heads, max_q;
  int32_t splits;             // of all requests: bs * nsplit without a plan; with one, what the plan may use at most
  int32_t path;               // TvPath
  int32_t taper;              // without a plan: of each request's splits the last, each half as long as the one before
  float sm_scale, logit_cap;  // logit_cap <= 0: none
  int32_t kv_dtype;           // TvDtype of the pool: `dtype` or an fp8
  float k_scale;              // a key or value is k_scale times what an fp8 pool holds; 1 for the other pools
  int64_t slots;              // of the pool; only debug builds ask (check.h)
} TvVerifyParams;

// The plan [2 * bs + 1]: in its order, longest splits first, the i-th request owns splits plan[i] .. plan[i + 1] and is
// number plan[bs + 1 + i] of the batch.
typedef struct TvPlanParams {
  const int32_t* kv_indptr;  // [bs + 1], unified layout
  int32_t* split_indptr;     // the plan, written
  int32_t bs;
  int32_t splits;  // in all, bs .. 1024. bs - 1 of them are spare, so that each request has one: the others run at once
} TvPlanParams;

typedef struct TvPrepParams {
  const int32_t* req_to_token;      // [rows, row_stride]
  const int64_t* req_pool_indices;  // [>= raw_bs]
  const void* seq_lens;             // [>= raw_bs] prefix lengths, int32 or int64
  const void* custom_mask;          // bytes (FULL or QLEN), uint64 [>= raw_bs, n, ceil(n / 64)] (PACKED) or null
  int32_t* kv_indptr;               // [bs + 1]
  void* kv_indices;                 // unified layout, int32 or int64
  uint64_t* packed_mask;            // [bs, n, ceil(n / 64)]
  int64_t row_stride;
  int64_t kv_capacity;  // entries behind kv_indices; nothing is written past them
  int64_t mask_numel;
  int32_t seq_len_bytes, kv_index_bytes, mask_kind;
  int32_t raw_bs, bs, n;  // requests raw_bs .. bs are padding: length 0; n = 0: no draft tokens, seq_lens counts all
  int64_t rows;           // of req_to_token; only debug builds ask
} TvPrepParams;

#ifdef __cplusplus
extern "C" {
#endif

// These return 0 or a cudaError_t; they only launch, never allocate or synchronise.
int tv_mla_verify(const TvVerifyParams* params, void* stream);
int tv_mla_prep(const TvPrepParams* params, void* stream);
int tv_mla_plan(const TvPlanParams* params, void* stream);

// The path (TvPath, not AUTO) that tv_mla_verify takes on the current device for queries of `dtype`, a pool of
// `kv_dtype` and requests of `rows` query rows, the most of them its blocks hold, and whether it has a kernel for
// requests of many (hopper/shape.cuh says how many): what a caller needs to choose the number of splits.
int tv_mla_path(int wanted, int dtype, int kv_dtype, int rows, int* path, int* max_row_tile, int* many_rows);

// Name, dynamic shared memory and block size of kernel i; non-zero past the end. Needs no GPU.
int tv_kernel_info(int i, const char** name, int* dynamic_smem_bytes, int* threads);

const char* tv_error_string(int code);

#ifdef __cplusplus
}
#endif
