// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of the splits of each query row: out = sum_s 2^(lse_s - top) out_s / sum_s 2^(lse_s -
// top).
//
// A warp takes one piece of a row, 128 dimensions, and every blockDim.y-th split of it; the blockDim.y warps that share
// a piece meet in shared memory. The host chooses blockDim.y so that few loads are left to each warp, and those are all
// in flight at once, before any weight is known. The order of the sums is fixed, so the bits are.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.cuh"
#include "kernel.h"

namespace tv {

constexpr int kCombineThreads = 256;
constexpr int kCombineWarps = kCombineThreads / 32;
constexpr int kPieceDims = kLatent / kCombinePieces;
constexpr int kInFlight = 8;  // loads of 16 bytes a thread
static_assert(kPieceDims == 32 * 4, "16 bytes a lane");
static_assert(kMaxSplits <= 32 * kCombineWarps, "a lane holds one log-sum-exp of its warp's splits");

__device__ __forceinline__ void store4(__nv_bfloat16* dst, float4 v) {
  union {
    __nv_bfloat162 half[2];
    uint2 word;
  } packed = {{__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)}};
  *reinterpret_cast<uint2*>(dst) = packed.word;
}
__device__ __forceinline__ void store4(__half* dst, float4 v) {
  union {
    __half2 half[2];
    uint2 word;
  } packed = {{__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)}};
  *reinterpret_cast<uint2*>(dst) = packed.word;
}

__device__ __forceinline__ void add_scaled(float4& sum, float weight, float4 v) {
  sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
}

// What a warp reads: its splits of one piece of a row. Offsets count 16 bytes: 32 bits reach 64 GiB.
struct Share {
  const float4* out;
  uint32_t at, step;  // of this lane in its first split, and on to the next
  const float* lse;   // of the split this lane stands for
  int count;          // splits, at most 32

  // Splits group, group + stride, .. below `active`.
  __device__ __forceinline__ Share(const Workspace& ws, int first, int active, int row, int dim, int group,
                                   int stride) {
    const uint32_t rows = uint32_t(ws.rows);
    count = group < active ? ceil_div(active - group, stride) : 0;
    out = reinterpret_cast<const float4*>(ws.out);
    at = ((first + group) * rows + row) * (kLatent / 4) + dim / 4;
    step = stride * rows * (kLatent / 4);
    lse = ws.partial_lse(first + group + int(threadIdx.x) * stride, row);
  }

  // The next kInFlight splits; zeros behind the end, where weights are 0 too.
  __device__ __forceinline__ void load(float4 (&v)[kInFlight]) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      v[i] = {0, 0, 0, 0};
      if (i < count) v[i] = __ldcg(out + (at + i * step));
    }
    at += kInFlight * step;
    count -= kInFlight;
  }
};

// The splits of a share merged, not normalised.
struct Merged {
  float top;    // largest log-sum-exp, -inf where no split saw anything
  float total;  // sum of the weights 2^(lse - top)
  float4 sum;   // of the weighted outputs

  __device__ __forceinline__ explicit Merged(Share share) {
    float4 v[kInFlight];
    const bool mine = int(threadIdx.x) < share.count;
    share.load(v);
    const float lse = mine ? __ldcg(share.lse) : -INFINITY;
    top = lse;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    const float weight = lse == -INFINITY ? 0 : exp2f(lse - top);
    total = weight;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
    sum = {0, 0, 0, 0};
#pragma unroll 1
    for (int at = 0;; at += kInFlight) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) add_scaled(sum, __shfl_sync(0xffffffffu, weight, at + i), v[i]);
      if (share.count <= 0) break;
      share.load(v);
    }
  }
};

// Where a row of q lies in the output.
template <typename T>
__device__ __forceinline__ T* out_row(const TvVerifyParams& p, int row) {
  const int64_t token = row / p.heads, head = row % p.heads;
  return static_cast<T*>(p.out) + token * p.out_stride_t + head * p.out_stride_h;
}

// Block (x, y) takes blockDim.z pieces of the rows of one request. Rows that no request covers are shared out over all
// blocks: zeros. Every block waits for the verify kernel, so that this one never ends before it.
template <typename T>
__device__ __forceinline__ void combine_block(const TvVerifyParams& p) {
  __shared__ float4 sums[kCombineWarps][32];
  __shared__ float2 weights[kCombineWarps];  // top and total
  const int lane = threadIdx.x, group = threadIdx.y, sharing = blockDim.y;
  const int item = blockIdx.x * blockDim.z + threadIdx.z, rows = gridDim.x * blockDim.z / kCombinePieces;
  const int row = item / kCombinePieces;  // the same in all warps of a block that meet
  const int dim = item % kCombinePieces * kPieceDims + 4 * lane;
  if (group == 0) {
    for (int r = covered_rows(p) + blockIdx.y * rows + row; r < p.tokens * p.heads; r += gridDim.y * rows) {
      store4(out_row<T>(p, r) + dim, {0, 0, 0, 0});
    }
  }
  const Split split = Split::of_request(p, blockIdx.y);
  const Request req(p, split.b);
  const int active = active_splits(req.len.kv, split.count);
  const Share share(Workspace(p), split.first, active, row, dim, group, sharing);
  T* dst = out_row<T>(p, req.first_token * p.heads + row) + dim;
  wait_for_primary();
  if (active <= 1 || row >= req.rows) return;

  Merged mine(share);
  if (sharing > 1) {
    const int warp = threadIdx.z * sharing + group;
    sums[warp][lane] = mine.sum;
    if (lane == 0) weights[warp] = {mine.top, mine.total};
    __syncthreads();
    if (group > 0) return;
    float top = mine.top;
    for (int g = 1; g < sharing; ++g) top = fmaxf(top, weights[warp + g].x);
    mine.sum = {0, 0, 0, 0}, mine.total = 0;
    for (int g = 0; g < sharing; ++g) {
      const float2 other = weights[warp + g];
      const float scale = other.x == -INFINITY ? 0 : exp2f(other.x - top);
      mine.total += scale * other.y;
      add_scaled(mine.sum, scale, sums[warp + g][lane]);
    }
  }
  const float inverse = mine.total > 0 ? __frcp_rn(mine.total) : 0;
  store4(dst, {mine.sum.x * inverse, mine.sum.y * inverse, mine.sum.z * inverse, mine.sum.w * inverse});
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
