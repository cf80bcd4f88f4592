// SPDX-License-Identifier: Apache-2.0
#include "head/merge.cuh"
#include "kernel.h"

extern "C" __global__ void __launch_bounds__(tv::head::kMergeThreads)
    tv_head_merge(const __grid_constant__ TvTopkMergeParams p) {
  __shared__ tv::head::Exchange<tv::head::kMergeThreads> exchange;
  tv::head::merge_row(p, exchange);
}

extern const tv::Kernel tv_head_merge_info;
const tv::Kernel tv_head_merge_info = {"tv_head_merge", reinterpret_cast<const void*>(tv_head_merge), 0,
                                       tv::head::kMergeThreads};
