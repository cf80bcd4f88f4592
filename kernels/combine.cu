// SPDX-License-Identifier: Apache-2.0
// The combine kernel for either element type.
#include "combine.cuh"
#include "kernel.h"

extern "C" __global__ void __launch_bounds__(tv::kCombineThreads)
    tv_combine_bf16(const __grid_constant__ TvVerifyParams p) {
  __shared__ tv::Meeting meeting;
  tv::combine_block<__nv_bfloat16>(p, meeting);
}
extern "C" __global__ void __launch_bounds__(tv::kCombineThreads)
    tv_combine_fp16(const __grid_constant__ TvVerifyParams p) {
  __shared__ tv::Meeting meeting;
  tv::combine_block<__half>(p, meeting);
}

extern const tv::Kernel tv_combine_bf16_info;
extern const tv::Kernel tv_combine_fp16_info;
const tv::Kernel tv_combine_bf16_info = {"tv_combine_bf16", reinterpret_cast<const void*>(tv_combine_bf16), 0,
                                         tv::kCombineThreads};
const tv::Kernel tv_combine_fp16_info = {"tv_combine_fp16", reinterpret_cast<const void*>(tv_combine_fp16), 0,
                                         tv::kCombineThreads};
