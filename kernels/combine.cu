// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of the splits of each query row: out = sum_s 2^(lse_s - max) out_s / sum_s 2^(lse_s -
// max). One block a row; 4 groups of threads take every 4th split, 4 dimensions a thread, and meet in shared memory.
// The order of the sums is fixed, so the bits are.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.cuh"
#include "kernel.h"

namespace tv {

constexpr int kGroups = 4;
constexpr int kGroupThreads = kLatent / 4;
constexpr int kCombineThreads = kGroups * kGroupThreads;

__device__ __forceinline__ void store4(__nv_bfloat16* dst, float4 v) {
  reinterpret_cast<__nv_bfloat162*>(dst)[0] = __floats2bfloat162_rn(v.x, v.y);
  reinterpret_cast<__nv_bfloat162*>(dst)[1] = __floats2bfloat162_rn(v.z, v.w);
}
__device__ __forceinline__ void store4(__half* dst, float4 v) {
  reinterpret_cast<__half2*>(dst)[0] = __floats2half2_rn(v.x, v.y);
  reinterpret_cast<__half2*>(dst)[1] = __floats2half2_rn(v.z, v.w);
}

// Weight of every split into `weight`, their sum into the return value. All threads call it.
__device__ __forceinline__ float split_weights(const Workspace& ws, int64_t row, int splits, float* weight) {
  const int lane = threadIdx.x % 32;
  float lse[kMaxSplits / 32], top = -INFINITY, total = 0;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int s = lane + 32 * i;
    lse[i] = s < splits ? *ws.partial_lse(row, s) : -INFINITY;
    top = fmaxf(top, lse[i]);
  }
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const float w = lse[i] == -INFINITY ? 0 : exp2f(lse[i] - top);
    total += w;
    if (threadIdx.x < 32) weight[lane + 32 * i] = w;
  }
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
  __syncthreads();
  return total;
}

template <typename T>
__device__ __forceinline__ void combine_row(const TvVerifyParams& p, int64_t row, int splits) {
  __shared__ float weight[kMaxSplits];
  __shared__ float4 meet[kGroups][kGroupThreads];
  const Workspace ws(p);
  const int group = threadIdx.x / kGroupThreads, at = threadIdx.x % kGroupThreads;
  const float total = split_weights(ws, row, splits, weight);
  float4 sum = {0, 0, 0, 0};
#pragma unroll 4
  for (int s = group; s < splits; s += kGroups) {
    const float w = weight[s];
    const float4 v = __ldcg(reinterpret_cast<const float4*>(ws.partial(row, s)) + at);
    sum.x += w * v.x, sum.y += w * v.y, sum.z += w * v.z, sum.w += w * v.w;
  }
  meet[group][at] = sum;
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
    const float4 v = meet[g][at];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  const float inverse = total > 0 ? 1 / total : 0;
  const int64_t token = row / p.heads, head = row % p.heads;
  T* dst = static_cast<T*>(p.out) + token * p.out_stride_t + head * p.out_stride_h;
  store4(dst + 4 * at, {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse});
}

// Block (i, b): row i of request b. Blocks with b == bs share out the rows that no request covers: no splits, zeros.
template <typename T>
__device__ __forceinline__ void combine_block(const TvVerifyParams& p) {
  const int b = blockIdx.y;
  if (b == p.bs) {
    wait_for_primary();
    for (int row = covered_rows(p) + blockIdx.x; row < p.tokens * p.heads; row += gridDim.x) {
      combine_row<T>(p, row, 0);
      __syncthreads();
    }
    return;
  }
  const Request req(p, b);
  wait_for_primary();
  if (int(blockIdx.x) >= req.rows) return;
  combine_row<T>(p, int64_t(req.first_token) * p.heads + blockIdx.x, active_splits(req.len.kv, p.nsplit));
}

}  // namespace tv

extern "C" __global__ void __launch_bounds__(tv::kCombineThreads)
    tv_combine_bf16(const __grid_constant__ TvVerifyParams p) {
  tv::combine_block<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(tv::kCombineThreads)
    tv_combine_fp16(const __grid_constant__ TvVerifyParams p) {
  tv::combine_block<__half>(p);
}

extern const tv::Kernel tv_combine_bf16_info;
extern const tv::Kernel tv_combine_fp16_info;
const tv::Kernel tv_combine_bf16_info = {"tv_combine_bf16", reinterpret_cast<const void*>(tv_combine_bf16), 0,
                                         tv::kCombineThreads};
const tv::Kernel tv_combine_fp16_info = {"tv_combine_fp16", reinterpret_cast<const void*>(tv_combine_fp16), 0,
                                         tv::kCombineThreads};
