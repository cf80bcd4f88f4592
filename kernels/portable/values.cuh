// SPDX-License-Identifier: Apache-2.0
// O^T += V^T . P^T: a warp's 64 of the 512 dimensions, for all rows; and the way of O out of the block.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

template <typename T, typename C>
struct Values {
  static constexpr int kDims = kLatent / kWarps;
  static constexpr int kSteps = C::kValueM * C::kK16;  // of 16 dimensions and 16 positions: position-major
  static constexpr int kHalf = kSteps / 2;

  int warp, lane;
  float o[C::kValueM][C::kN8][4] = {};
  uint32_t prob[C::kN8][2];  // B fragments of 16 positions
  uint32_t value[kHalf][4];  // A fragments of half a tile's steps

  __device__ __forceinline__ Values(int warp, int lane) : warp(warp), lane(lane) {}

  __device__ __forceinline__ void load_probs(uint32_t probs, int k16) {
    const uint32_t src = probs + ((lane & 7) * C::kProbStride + 16 * k16 + (lane & 8)) * 2;
#pragma unroll
    for (int j = 0; j + 1 < C::kN8; j += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, src + (8 * j + 8 * (lane >> 4)) * C::kProbStride * 2);
      prob[j][0] = r[0], prob[j][1] = r[1], prob[j + 1][0] = r[2], prob[j + 1][1] = r[3];
    }
    if constexpr (C::kN8 % 2) ldmatrix_x2(prob[C::kN8 - 1], src + 8 * (C::kN8 - 1) * C::kProbStride * 2);
  }

  // Fragments of the first or second half of a tile's steps.
  template <int half>
  __device__ __forceinline__ void load(uint32_t stage, uint32_t probs) {
    constexpr int kFirst = half * kHalf;
    if (kFirst % C::kValueM == 0) load_probs(probs, kFirst / C::kValueM);
    const uint32_t src = stage + kv_offset((lane & 7) + (lane >> 4) * 8, 8 * warp + ((lane >> 3) & 1));
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int k16 = (kFirst + i) / C::kValueM, m = (kFirst + i) % C::kValueM;
      // 2 m chunks further: chunks are permuted by exclusive or, and so is this.
      ldmatrix_x4_trans(value[i], (src + 16 * k16 * kKeyDim * 2) ^ (m << 5));
    }
  }

  template <int half>
  __device__ __forceinline__ void multiply(bool on) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int m = (half * kHalf + i) % C::kValueM;
#pragma unroll
      for (int j = 0; j < C::kN8; ++j) mma_16x8x16<T>(o[m][j], value[i], prob[j], on);
    }
  }

  __device__ __forceinline__ void scale(const float* factors) {
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * (lane & 3));
#pragma unroll
      for (int m = 0; m < C::kValueM; ++m) {
        o[m][j][0] *= f.x, o[m][j][1] *= f.y, o[m][j][2] *= f.x, o[m][j][3] *= f.y;
      }
    }
  }

  // Sums are staged as [warp][row][dimension of the warp]. The row permutes eights of dimensions, so that what a warp
  // stores at once lies in all banks, and what it reads at once as well.
  __device__ __forceinline__ static int staged_at(int warp, int row, int dim) {
    return (warp * C::kRows + row) * kDims + (dim ^ (row & 6) * 4);
  }

  __device__ __forceinline__ void stage(float* staging) const {
#pragma unroll
    for (int m = 0; m < C::kValueM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* dst = staging + staged_at(warp, 2 * (lane & 3), 16 * m + 8 * (i / 2)) + (lane >> 2);
#pragma unroll
        for (int j = 0; j < C::kN8; ++j) dst[(8 * j + i % 2) * kDims] = o[m][j][i];
      }
    }
  }

  // Dimensions dim .. dim + 3 of a row, dim a multiple of 4.
  __device__ __forceinline__ static float4 staged_sums(const float* staging, int row, int dim) {
    return *reinterpret_cast<const float4*>(staging + staged_at(dim / kDims, row, dim % kDims));
  }
};

}  // namespace tv::portable
