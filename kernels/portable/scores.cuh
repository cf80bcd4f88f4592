// SPDX-License-Identifier: Apache-2.0
// S^T = K . Q^T: a warp's slice of the key dimension, for its share of positions and rows, into shared memory.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/rows.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

template <typename T, typename C>
struct Scores {
  int slice, half, group, lane;
  uint32_t q[C::kSteps][C::kScoreN][2];  // B fragments, one for each 16 dimensions and 8 rows
  float sum[C::kScoreM][C::kScoreN][4];

  __device__ __forceinline__ Scores(int warp, int lane)
      : slice(warp % C::kSlices),
        half(warp / C::kSlices % C::kHalves),
        group(warp / C::kSlices / C::kHalves),
        lane(lane) {}

  // Eights of rows that exist; of an odd number the second group has one less.
  __device__ __forceinline__ int eight(int j) const { return group * C::kScoreN + j; }
  __device__ __forceinline__ bool exists(int j) const {
    return (j + 1 < C::kScoreN || C::kN8 % C::kGroups == 0) ? true : eight(j) < C::kN8;
  }

  // Rows past the request repeat its last one: nobody reads what becomes of them.
  __device__ __forceinline__ void load_queries(const TvVerifyParams& p, const Request& req, const RowPlace& place,
                                               int row0) {
    const int dim = 16 * slice + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < C::kScoreN; ++j) {
      const int row = min(row0 + 8 * eight(j) + (lane >> 2), req.rows - 1);
      const T* nope = static_cast<const T*>(p.q_nope) + place.at(row, p.q_nope_stride_t, p.q_nope_stride_h) + dim;
      const T* pe = static_cast<const T*>(p.q_pe) + place.at(row, p.q_pe_stride_t, p.q_pe_stride_h) + dim;
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s) {
        const T* src = 64 * s < kLatent ? nope + 64 * s : pe;
        q[s][j][0] = *reinterpret_cast<const uint32_t*>(src);
        q[s][j][1] = *reinterpret_cast<const uint32_t*>(src + 8);
      }
    }
  }

  __device__ __forceinline__ void multiply(uint32_t stage) {
    const uint32_t src = stage + kv_offset(16 * half + (lane & 15), 2 * slice + (lane >> 4));
#pragma unroll
    for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
      for (int j = 0; j < C::kScoreN; ++j) sum[m][j][0] = sum[m][j][1] = sum[m][j][2] = sum[m][j][3] = 0;
    }
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
      for (int m = 0; m < C::kScoreM; ++m) {
        uint32_t k[4];
        ldmatrix_x4(k, src + m * 16 * kKeyDim * 2 + s * 128);
#pragma unroll
        for (int j = 0; j < C::kScoreN; ++j) mma_16x8x16<T>(sum[m][j], k, q[s][j], exists(j));
      }
    }
  }

  // To scores[slice][row][position]. The stride spreads the 4 pairs of rows that a warp stores at once over all banks.
  __device__ __forceinline__ void store(float* scores) const {
    float* base = scores + (slice * C::kRows + 2 * (lane & 3)) * C::kScoreStride + 16 * half + (lane >> 2);
#pragma unroll
    for (int j = 0; j < C::kScoreN; ++j) {
      if (!exists(j)) break;
#pragma unroll
      for (int m = 0; m < C::kScoreM; ++m) {
        float* dst = base + 8 * eight(j) * C::kScoreStride + 16 * m;
        dst[0] = sum[m][j][0];
        dst[C::kScoreStride] = sum[m][j][1];
        dst[8] = sum[m][j][2];
        dst[C::kScoreStride + 8] = sum[m][j][3];
      }
    }
  }
};

}  // namespace tv::portable
