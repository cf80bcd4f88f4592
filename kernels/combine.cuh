// SPDX-License-Identifier: Apache-2.0
// Merges the partial results of the splits of each query row: out = sum_s 2^(lse_s - top) out_s / sum_s 2^(lse_s -
// top).
//
// A warp takes one piece of a row, 128 dimensions, and all splits of it, whose loads are in flight at once, before any
// weight is known. Where a request has many splits, two to eight warps share them and meet in shared memory. The blocks
// that stand for a request's splits take turns at its pieces, so that a full wave of blocks merges any batch. The order
// of the sums depends on the number of splits alone, so the bits do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.cuh"

namespace tv {

constexpr int kCombineThreads = 256;
constexpr int kCombineWarps = kCombineThreads / 32;
constexpr int kPieceDims = kLatent / kCombinePieces;
constexpr int kInFlight = 8;  // loads of 16 bytes a thread
static_assert(kPieceDims == 32 * 4, "16 bytes a lane");
static_assert(kMaxSplits <= 32 * kCombineWarps, "a lane holds one log-sum-exp of its warp's splits");

// Warps that share the splits of a piece.
__device__ __forceinline__ int warps_a_piece(int active) {
  return active > 4 * kInFlight ? 8 : active > 2 * kInFlight ? 4 : active > kInFlight ? 2 : 1;
}

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
    lse = ws.partial_lse(first + group + int(threadIdx.x % 32) * stride, row);
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
    const bool mine = int(threadIdx.x % 32) < share.count;
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

  // With those of the warps behind this one; `sharing` of them in all.
  __device__ __forceinline__ void meet(const float4 (*sums)[32], const float2* weights, int warp, int sharing,
                                       int lane) {
    for (int g = 1; g < sharing; ++g) top = fmaxf(top, weights[warp + g].x);
    sum = {0, 0, 0, 0}, total = 0;
    for (int g = 0; g < sharing; ++g) {
      const float2 other = weights[warp + g];
      const float scale = other.x == -INFINITY ? 0 : exp2f(other.x - top);
      total += scale * other.y;
      add_scaled(sum, scale, sums[warp + g][lane]);
    }
  }
};

// Where a row of q lies in the output.
template <typename T>
__device__ __forceinline__ T* out_row(const TvVerifyParams& p, int row) {
  const int64_t token = row / p.heads, head = row % p.heads;
  return static_cast<T*>(p.out) + token * p.out_stride_t + head * p.out_stride_h;
}

// Rows that no request covers, shared out over all blocks: zeros.
template <typename T>
__device__ __forceinline__ void zero_uncovered(const TvVerifyParams& p, int warp, int lane) {
  const int64_t end = int64_t(p.tokens) * p.heads * kCombinePieces;
  const int step = gridDim.x * gridDim.y * kCombineWarps;
  int64_t i = int64_t(covered_rows(p)) * kCombinePieces;
  for (i += (blockIdx.y * gridDim.x + blockIdx.x) * kCombineWarps + warp; i < end; i += step) {
    store4(out_row<T>(p, int(i / kCombinePieces)) + i % kCombinePieces * kPieceDims + 4 * lane, {0, 0, 0, 0});
  }
}

// Where warps that share the splits of a piece meet. In turns: one is read while the next fills.
struct Meeting {
  float4 sums[2][kCombineWarps][32];
  float2 weights[2][kCombineWarps];  // top and total
};

// Blocks (*, y) stand for split y, counted over the batch. Every block waits for the verify kernel, so that this one
// never ends before it.
template <typename T>
__device__ __forceinline__ void combine_block(const TvVerifyParams& p, Meeting& at) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, int(threadIdx.x / 32), 0);
  zero_uncovered<T>(p, warp, lane);
  const Split split = Split::of_block(p, blockIdx.y);
  const Request req(p, min(split.b, p.bs - 1));
  const int active = split.b < p.bs ? active_splits(req.len.kv, split.cut) : 0;
  wait_for_primary();
  if (active <= 1) return;

  const Workspace ws(p);
  const int sharing = warps_a_piece(active), pieces = kCombineWarps / sharing, items = req.rows * kCombinePieces;
  const int group = warp % sharing;
  int turn = 0;
#pragma unroll 1
  for (int first = (split.index * gridDim.x + blockIdx.x) * pieces; first < items;
       first += split.cut.splits * gridDim.x * pieces) {
    const int item = first + warp / sharing, row = item / kCombinePieces;  // the same in all warps that meet
    const int dim = item % kCombinePieces * kPieceDims + 4 * lane;
    Merged mine(Share(ws, split.first, item < items ? active : 0, row, dim, group, sharing));
    if (sharing > 1) {
      at.sums[turn][warp][lane] = mine.sum;
      if (lane == 0) at.weights[turn][warp] = {mine.top, mine.total};
      __syncthreads();
      if (group == 0) mine.meet(at.sums[turn], at.weights[turn], warp, sharing, lane);
      turn ^= 1;
    }
    if (group == 0 && item < items) {
      const float inverse = mine.total > 0 ? __frcp_rn(mine.total) : 0;
      store4(out_row<T>(p, req.first_token * p.heads + row) + dim,
             {mine.sum.x * inverse, mine.sum.y * inverse, mine.sum.z * inverse, mine.sum.w * inverse});
    }
  }
}

}  // namespace tv
