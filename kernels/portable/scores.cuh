// SPDX-License-Identifier: Apache-2.0
// S^T = K . Q^T: a warp's slice of the key dimension, for its share of positions and rows, into shared memory.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/rows.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

// Fragments of an fp8 pool come as four neighbouring dimensions a lane. Products sum over dimensions in any order that
// both sides share: so the lane takes the same four of Q, where a pool like Q has it take two and two.
template <typename T, typename C>
struct Scores {
  using Math = typename C::Pool::template Math<T>;

  int slice, half, group, lane;
  static constexpr int kInRegisters = C::kSteps - C::kSharedSteps;
  static constexpr int kStepBytes = 64 * sizeof(typename C::Pool::Element);

  uint32_t q[C::Pool::kFp8 ? C::kSteps : kInRegisters][C::kScoreN][2];  // B fragments, of 16 dimensions and 8 rows
  const uint4* shared_q;                                                // those of the last steps
  uint32_t first[C::kScoreM][4];  // of K, of the first step; where the pool is fp8, of two
  float sum[C::kScoreM][C::kScoreN][4];
  uint32_t key_at, store_at;  // where the lane begins: bytes in a stage, floats in the scores

  __device__ __forceinline__ Scores(int warp, int lane)
      : slice(warp % C::kSlices),
        half(warp / C::kSlices % C::kHalves),
        group(warp / C::kSlices / C::kHalves),
        lane(lane) {
    const int first_pos = 16 * C::kScoreM * half;
    key_at = kept(C::Pool::kFp8 ? C::kv_offset(first_pos + (lane & 15), slice) + (lane >> 4) * kStepBytes
                                : C::kv_offset(first_pos + (lane & 15), 2 * slice + (lane >> 4)));
    // The stride spreads the 4 pairs of rows that a warp stores at once over all banks.
    store_at = kept((slice * C::kRows + 8 * eight(0) + 2 * (lane & 3)) * C::kScoreStride + first_pos + (lane >> 2));
  }

  // Eights of rows that exist; of an odd number the second group has one less.
  __device__ __forceinline__ int eight(int j) const { return group * C::kScoreN + j; }
  __device__ __forceinline__ bool exists(int j) const {
    return (j + 1 < C::kScoreN || C::kN8 % C::kGroups == 0) ? true : eight(j) < C::kN8;
  }

  __device__ __forceinline__ uint32_t* shared_queries(uint8_t* shared) const {
    const int copy = C::kQueryCopies > 1 ? half : 0;
    return reinterpret_cast<uint32_t*>(shared) + (32 * (C::kSlices * copy + slice) + lane) * C::kSharedQueryRegs;
  }

  // Rows past the request repeat its last one: nobody reads what becomes of them.
  __device__ __forceinline__ void load_queries(const TvVerifyParams& p, const Request& req, const RowPlace& place,
                                               int row0, uint8_t* shared) {
    uint32_t* const mine = shared_queries(shared);
    shared_q = reinterpret_cast<const uint4*>(mine);
    constexpr int kNeighbours = C::Pool::kFp8 ? 4 : 2, kNext = C::Pool::kFp8 ? 2 : 8;
    const int dim = 16 * slice + kNeighbours * (lane & 3);
#pragma unroll
    for (int j = 0; j < C::kScoreN; ++j) {
      const int row = min(row0 + 8 * eight(j) + (lane >> 2), req.rows - 1);
      const T* nope = static_cast<const T*>(p.q_nope) + place.at(row, p.q_nope_stride_t, p.q_nope_stride_h) + dim;
      const T* pe = static_cast<const T*>(p.q_pe) + place.at(row, p.q_pe_stride_t, p.q_pe_stride_h) + dim;
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s) {
        const T* src = 64 * s < kLatent ? nope + 64 * s : pe;
        const bool kept_here = C::Pool::kFp8 || s < kInRegisters;
        uint32_t* const dst = kept_here ? q[s][j] : mine + ((s - kInRegisters) * C::kScoreN + j) * 2;
        dst[0] = *reinterpret_cast<const uint32_t*>(src);
        dst[1] = *reinterpret_cast<const uint32_t*>(src + kNext);
      }
    }
  }

  // The magnitude of the warp's largest finite element of Q, which is bf16, as the bits of a float: a row that has an
  // infinity is lost, and by its measure all others of the block would be 0.
  __device__ __forceinline__ uint32_t largest_query() const {
    uint32_t pair = 0;
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < C::kScoreN; ++j) {
        pair = greater_bf16(pair, finite_bf16(q[s][j][0] & 0x7fff7fffu));
        pair = greater_bf16(pair, finite_bf16(q[s][j][1] & 0x7fff7fffu));
      }
    }
    return __reduce_max_sync(0xffffffffu, max(pair & 0xffff0000u, pair << 16));
  }

  // Q times `unit`, a power of 2, as fp16, where all of it has been bf16 in registers.
  __device__ __forceinline__ void narrow_queries(float unit, uint8_t* shared) {
    uint32_t* const mine = shared_queries(shared);
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < C::kScoreN; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 pair = widen2<T>(q[s][j][i]);
          q[s][j][i] = round2<Math>(pair.x * unit, pair.y * unit);
          if (s >= kInRegisters) mine[((s - kInRegisters) * C::kScoreN + j) * 2 + i] = q[s][j][i];
        }
      }
    }
  }

  // Fragments of K of the first step.
  __device__ __forceinline__ void load_first(uint32_t stage) {
#pragma unroll
    for (int m = 0; m < C::kScoreM; ++m) ldmatrix_x4(first[m], stage + key_at + m * 16 * C::kRowBytes);
  }

  // Fragments of K of a step. Those of an fp8 pool are `loaded` for two steps at once, the first ones before.
  __device__ __forceinline__ static void load_key(uint32_t src, int s, uint32_t (&loaded)[4], uint32_t (&k)[4]) {
    if constexpr (!C::Pool::kFp8) {
      if (s > 0) ldmatrix_x4(k, src + s * kStepBytes);
    } else {
      if (s > 0 && s % 2 == 0) {
        if (s + 1 < C::kSteps) {
          ldmatrix_x4(loaded, src + s * kStepBytes);
        } else {
          uint32_t last[2];
          ldmatrix_x2(last, src + s * kStepBytes);
          loaded[0] = last[0], loaded[1] = last[1];
        }
      }
      C::Pool::neighbours(loaded[s % 2 * 2], k[0], k[2]);
      C::Pool::neighbours(loaded[s % 2 * 2 + 1], k[1], k[3]);
    }
  }

  __device__ __forceinline__ void multiply(uint32_t stage) {
    const uint32_t src = stage + key_at;
    float chain[C::kScoreChains][C::kScoreM][C::kScoreN][4] = {};
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
      for (int m = 0; m < C::kScoreM; ++m) {
        uint32_t k[4] = {first[m][0], first[m][1], first[m][2], first[m][3]};
        load_key(src + m * 16 * C::kRowBytes, s, first[m], k);
#pragma unroll
        for (int j = 0; j < C::kScoreN; ++j) {
          if (s < kInRegisters) {
            mma_16x8x16<Math>(chain[s % C::kScoreChains][m][j], k, q[s][j], exists(j));
          } else if (j % 2 == 0) {
            const uint4 two = shared_q[((s - kInRegisters) * C::kScoreN + j) / 2];
            mma_16x8x16<Math>(chain[s % C::kScoreChains][m][j], k, {two.x, two.y}, true);
            mma_16x8x16<Math>(chain[s % C::kScoreChains][m][j + 1], k, {two.z, two.w}, true);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < C::kScoreM; ++m) {
#pragma unroll
      for (int j = 0; j < C::kScoreN; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[m][j][i] = chain[0][m][j][i];
#pragma unroll
          for (int c = 1; c < C::kScoreChains; ++c) sum[m][j][i] += chain[c][m][j][i];
        }
      }
    }
  }

  // To scores[slice][row][position].
  __device__ __forceinline__ void store(float* scores) const {
#pragma unroll
    for (int j = 0; j < C::kScoreN; ++j) {
      if (!exists(j)) break;
#pragma unroll
      for (int m = 0; m < C::kScoreM; ++m) {
        float* dst = scores + store_at + 8 * j * C::kScoreStride + 16 * m;
        dst[0] = sum[m][j][0];
        dst[C::kScoreStride] = sum[m][j][1];
        dst[8] = sum[m][j][2];
        dst[C::kScoreStride + 8] = sum[m][j][3];
      }
    }
  }
};

}  // namespace tv::portable
