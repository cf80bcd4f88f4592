// SPDX-License-Identifier: Apache-2.0
// Online softmax along the rows of S: thread (warp w, lane l) holds 16 positions each of rows 16 w + l / 4 and + 8, the
// four lanes of a quad all 64. References are as in hopper/softmax.cuh; a row's is kept by all threads that share it.
#pragma once

#include "hopper/m64/shape.cuh"
#include "hopper/softmax.cuh"

namespace tv::hopper::m64 {

constexpr int kN8 = kTile / 8;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Raw scores to base-2 logits less the reference of their row.
__device__ __forceinline__ void to_exponents(const TvVerifyParams& p, const float (&reference)[2], float (&s)[kN8][4]) {
  const float scale = capped(p, s);
  const float base[2] = {finite(reference[0]), finite(reference[1])};
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = s[j][i] * scale - base[i / 2];
  }
}

// Lane l has the visible positions of row l % 16 of its warp.
__device__ __forceinline__ void hide(float (&s)[kN8][4], uint64_t visible, int lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint64_t bits = __shfl_sync(0xffffffffu, visible, lane / 4 + 8 * row) >> 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!(bits >> (8 * j + c) & 1)) s[j][2 * row + c] = -INFINITY;
      }
    }
  }
}

__device__ __forceinline__ void largest(const float (&s)[kN8][4], float (&top)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    top[row] = fmaxf(s[0][2 * row], s[0][2 * row + 1]);
#pragma unroll
    for (int j = 1; j < kN8; ++j) top[row] = fmaxf(top[row], fmaxf(s[j][2 * row], s[j][2 * row + 1]));
  }
}

// What sums against `before` are multiplied with to be sums against `after`.
__device__ __forceinline__ float factor(float before, float after) {
  return before == after ? 1 : exp2_approx(before - after);
}

// Exponents to P, rounded and packed as the A operand of its product with V: a fragment for each 16 positions. Adds up
// what is multiplied.
template <typename T>
__device__ __forceinline__ void exponentials(const float (&s)[kN8][4], uint32_t (&prob)[kN8 / 2][4], float (&sum)[2]) {
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t packed = pack2(T(), exp2_approx(s[j][2 * row]), exp2_approx(s[j][2 * row + 1]));
      const float2 rounded = unpack2(T(), packed);
      prob[j / 2][j % 2 * 2 + row] = packed;
      sum[row] += rounded.x + rounded.y;
    }
  }
}

// Byte offset within a panel of 64 rows of what a lane addresses for the warp's first fragment of an A operand; 32 i
// changes it to that of fragment i by exclusive or.
__device__ __forceinline__ uint32_t fragment_offset(int warp, int lane) {
  return (16 * warp + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
}

}  // namespace tv::hopper::m64
