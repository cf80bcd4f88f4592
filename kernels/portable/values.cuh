// SPDX-License-Identifier: Apache-2.0
// O^T += V^T . P^T: a warp's 64 of the 512 dimensions, for all rows; and the way of O out of the block.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

// Fragments of an fp8 pool come as two neighbouring dimensions of two positions a lane. So there the lane's rows of
// V^T, and of O^T, are neighbours, where those of a pool like Q are 8 apart.
template <typename T, typename C>
struct Values {
  static constexpr int kDims = kLatent / kWarps;
  static constexpr int kSteps = C::kValueM * C::kK16;  // of 16 dimensions and 16 positions: position-major
  static constexpr int kQuarter = kSteps / 4;          // so fragments come in: a quarter of a tile's steps at a time
  static constexpr int kProbs = C::kK16 > 1 && C::kSharedSteps == 0 ? 2 : 1;  // as far as registers reach

  int warp, lane;
  float o[C::kValueM][C::kN8][4] = {};
  uint32_t prob[kProbs][C::kN8][2];  // B fragments of 16 positions
  static constexpr int kLoaded = C::Pool::kFp8 ? 2 : 4;
  uint32_t value[2][kQuarter][kLoaded];  // A fragments of a quarter, as the pool has them
  uint32_t value_at, prob_at;            // where the lane begins: bytes in a stage, bytes in P

  __device__ __forceinline__ Values(int warp, int lane)
      : warp(warp),
        lane(lane),
        value_at(kept(C::Pool::kFp8 ? C::kv_offset(lane & 15, 4 * warp + (lane >> 4))
                                    : C::kv_offset((lane & 7) + (lane >> 4) * 8, 8 * warp + ((lane >> 3) & 1)))),
        prob_at(kept((((lane & 7) + 8 * (lane >> 4)) * C::kProbStride + (lane & 8)) * 2)) {}

  // P fragments of 16 positions.
  __device__ __forceinline__ void load_probs(uint32_t probs, int k16) {
    const uint32_t src = probs + prob_at + 16 * k16 * 2;
    uint32_t (&dst)[C::kN8][2] = prob[k16 % kProbs];
#pragma unroll
    for (int j = 0; j + 1 < C::kN8; j += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, src + 8 * j * C::kProbStride * 2);
      dst[j][0] = r[0], dst[j][1] = r[1], dst[j + 1][0] = r[2], dst[j + 1][1] = r[3];
    }
    if constexpr (C::kN8 % 2) ldmatrix_x2(dst[C::kN8 - 1], src + 8 * (C::kN8 - 1) * C::kProbStride * 2);
  }

  // Those of the positions after, once a quarter is multiplied: in time before their products where they have registers
  // of their own.
  template <int quarter>
  __device__ __forceinline__ void load_more_probs(uint32_t probs) {
    if (C::kK16 == 2 && quarter == 2 - kProbs) load_probs(probs, 1);
    if (C::kK16 == 4 && quarter < 3) load_probs(probs, quarter + 1);
  }

  // V fragments of a quarter, in place of those two quarters before.
  template <int quarter>
  __device__ __forceinline__ void load(uint32_t stage) {
    const uint32_t src = stage + value_at + quarter * kQuarter / C::kValueM * 16 * C::kRowBytes;
    constexpr int kFirst = quarter * kQuarter % C::kValueM;
    // Chunks are permuted by exclusive or, and so is the way to the one that is 2 m chunks further, or m.
    if constexpr (!C::Pool::kFp8) {
#pragma unroll
      for (int i = 0; i < kQuarter; ++i) ldmatrix_x4_trans(value[quarter % 2][i], src ^ ((kFirst + i) << 5));
    } else if constexpr (kQuarter == 1) {
      ldmatrix_x2_trans(value[quarter % 2][0], src ^ (kFirst << 4));
    } else {
      static_assert(kQuarter % 2 == 0);
#pragma unroll
      for (int pair = 0; pair < kQuarter; pair += 2) {
        uint32_t both[4];
        ldmatrix_x4_trans(both, src ^ ((kFirst + pair) << 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) value[quarter % 2][pair + i / 2][i % 2] = both[i];
      }
    }
  }

  // A fragments of step i of a quarter.
  template <int quarter>
  __device__ __forceinline__ void widen(int i, uint32_t (&a)[4]) const {
    const uint32_t (&v)[kLoaded] = value[quarter % 2][i];
    if constexpr (C::Pool::kFp8) {
      C::Pool::columns(v[0], a[0], a[1]);
      C::Pool::columns(v[1], a[2], a[3]);
    } else {
      a[0] = v[0], a[1] = v[1], a[2] = v[2], a[3] = v[3];
    }
  }

  template <int quarter>
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) {
      const int step = quarter * kQuarter + i;
      uint32_t a[4];
      widen<quarter>(i, a);
#pragma unroll
      for (int j = 0; j < C::kN8; ++j) {
        mma_16x8x16<T>(o[step % C::kValueM][j], a, prob[step / C::kValueM % kProbs][j], true);
      }
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
      if constexpr (C::Pool::kFp8) {
        stage_pairs(staging, m);
      } else {
        stage_apart(staging, m);
      }
    }
  }

  // The lane's dimensions of an m are 8 apart.
  __device__ __forceinline__ void stage_apart(float* staging, int m) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* dst = staging + staged_at(warp, 2 * (lane & 3), 16 * m + 8 * (i / 2)) + (lane >> 2);
#pragma unroll
      for (int j = 0; j < C::kN8; ++j) dst[(8 * j + i % 2) * kDims] = o[m][j][i];
    }
  }

  // They are neighbours.
  __device__ __forceinline__ void stage_pairs(float* staging, int m) const {
    float* dst = staging + staged_at(warp, 2 * (lane & 3), 16 * m + 2 * (lane >> 2));
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) *reinterpret_cast<float2*>(dst + (8 * j + i) * kDims) = {o[m][j][i], o[m][j][i + 2]};
    }
  }

  // Dimensions dim .. dim + 3 of a row, dim a multiple of 4.
  __device__ __forceinline__ static float4 staged_sums(const float* staging, int row, int dim) {
    return *reinterpret_cast<const float4*>(staging + staged_at(dim / kDims, row, dim % kDims));
  }
};

}  // namespace tv::portable
