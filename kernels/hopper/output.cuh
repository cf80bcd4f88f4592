// SPDX-License-Identifier: Apache-2.0
// The end of a block whose request has no other split: its normalised rows, fp32 in shared memory, become the output.
#pragma once

#include "device.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/softmax.cuh"

namespace tv::hopper {

// Rows row0 .. of the request, kStride floats apart, once both computing warpgroups have written theirs.
template <typename T, int kStride>
__device__ __forceinline__ void write_rows(const TvVerifyParams& p, const Job& job, int row0, const uint8_t* from) {
  const int i = threadIdx.x - kWarpgroup, lane = threadIdx.x % 32, rows = job.rows;
  sync_threads<2 * kWarpgroup>(3);
  const int64_t first_token = job.first_token;
#pragma unroll 1
  for (int row = i / 32; row < rows; row += 8) {
    const float4* src = reinterpret_cast<const float4*>(from) + row * (kStride / 4) + lane;
    const int64_t token = first_token + (row0 + row) / p.heads, head = (row0 + row) % p.heads;
    uint2* dst = reinterpret_cast<uint2*>(static_cast<T*>(p.out) + token * p.out_stride_t + head * p.out_stride_h);
#pragma unroll
    for (int k = 0; k < kLatent / 128; ++k) {
      const float4 v = src[32 * k];
      dst[lane + 32 * k] = {pack2(T(), v.x, v.y), pack2(T(), v.z, v.w)};
    }
  }
}

}  // namespace tv::hopper
