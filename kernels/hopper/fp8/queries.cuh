// SPDX-License-Identifier: Apache-2.0
// Q of a block as fp16: exact, once a power of 2 has brought its largest element to 2^14 .. 2^15.
#pragma once

#include "device.cuh"
#include "hopper/fp8/shape.cuh"
#include "hopper/ptx.cuh"
#include "hopper/softmax.cuh"
#include "query_unit.cuh"

namespace tv::hopper::fp8 {

// What a thread of the two computing warpgroups loads of Q: 16 dimensions of some rows, until they are stored.
template <typename T, typename S>
struct Queries {
  static constexpr int kUnits = S::kQueryRows * kKeyDim / 16, kEach = (kUnits + 2 * kWarpgroup - 1) / (2 * kWarpgroup);
  uint4 part[kEach][2];

  __device__ __forceinline__ void load(const TvVerifyParams& p, const Request& req, int row0, uint32_t) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int unit = i * 2 * kWarpgroup + int(threadIdx.x) - kWarpgroup, dim = unit % (kKeyDim / 16) * 16;
      const int row = row0 + unit / (kKeyDim / 16);
      part[i][0] = part[i][1] = {0, 0, 0, 0};
      if (unit >= kUnits || row >= req.rows) continue;
      const int64_t token = req.first_token + row / p.heads, head = row % p.heads;
      const T* nope = static_cast<const T*>(p.q_nope) + token * p.q_nope_stride_t + head * p.q_nope_stride_h + dim;
      const T* pe = static_cast<const T*>(p.q_pe) + token * p.q_pe_stride_t + head * p.q_pe_stride_h + dim - kLatent;
      const uint4* src = reinterpret_cast<const uint4*>(dim < kLatent ? nope : pe);
      part[i][0] = src[0], part[i][1] = src[1];
    }
  }

  // The largest finite magnitude of the warp's, as the bits of a float.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t words[4] = {part[i][j].x, part[i][j].y, part[i][j].z, part[i][j].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) pair = greater_bf16(pair, finite_bf16(words[k] & 0x7fff7fffu));
      }
    }
    return __reduce_max_sync(0xffffffffu, max(pair & 0xffff0000u, pair << 16));
  }

  // To shared memory, with the largest elements, from which the unit is to be had.
  __device__ __forceinline__ void land(uint8_t* shared, uint32_t smem) const {
    uint32_t* all = reinterpret_cast<uint32_t*>(shared + S::kLargest);
    const uint32_t mine = largest();
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32 - kWarpgroup / 32] = mine;
    sync_threads<2 * kWarpgroup>(3);
    const QueryUnit unit(all);
    if (threadIdx.x == kWarpgroup) *reinterpret_cast<float*>(shared + S::kUnit) = unit.inverse;
    store(smem, unit.factor);
    fence_async_reads();
    barrier_arrive(smem + S::kQueryFull);
  }

  __device__ __forceinline__ static uint32_t narrow(uint32_t pair, float factor) {
    const float2 v = unpack2(T(), pair);
    return pack2(__half(), v.x * factor, v.y * factor);
  }

  // To shared memory, times `factor`. A fragment of K as it comes from the pool has dimensions 4 q .. 4 q + 3 of a
  // product's 16 where wgmma wants 2 q, 2 q + 1, 2 q + 8, 2 q + 9: so Q has that order too.
  __device__ __forceinline__ void store(uint32_t smem, float factor) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int unit = i * 2 * kWarpgroup + int(threadIdx.x) - kWarpgroup;
      if (unit >= kUnits) break;
      const int row = unit / (kKeyDim / 16), at = unit % (kKeyDim / 16);
      const uint32_t panel = smem + at / 4 * S::kQPanelBytes;
      const uint4 a = part[i][0], b = part[i][1];
      const auto f = [&](uint32_t pair) { return narrow(pair, factor); };
      store_shared16(panel + panel_offset(row, at % 4 * 2), {f(a.x), f(a.z), f(b.x), f(b.z)});
      store_shared16(panel + panel_offset(row, at % 4 * 2 + 1), {f(a.y), f(a.w), f(b.y), f(b.w)});
    }
  }
};

}  // namespace tv::hopper::fp8
