// SPDX-License-Identifier: Apache-2.0
#include "head/lists.cuh"
#include "kernel.h"

// Four blocks a multiprocessor: some wait for their logits while others rank theirs.
#define TV_LISTS(NAME, T)                                                 \
  extern "C" __global__ void __launch_bounds__(tv::head::kListThreads, 4) \
      NAME(const __grid_constant__ TvTopkListsParams p) {                 \
    __shared__ tv::head::Exchange<tv::head::kListThreads> exchange;       \
    tv::head::make_list<T>(p, exchange);                                  \
  }                                                                       \
  extern const tv::Kernel NAME##_info;                                    \
  const tv::Kernel NAME##_info = {#NAME, reinterpret_cast<const void*>(NAME), 0, tv::head::kListThreads};

TV_LISTS(tv_head_lists_bf16, __nv_bfloat16)
TV_LISTS(tv_head_lists_fp16, __half)
TV_LISTS(tv_head_lists_fp32, float)
