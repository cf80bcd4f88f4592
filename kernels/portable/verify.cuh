// SPDX-License-Identifier: Apache-2.0
// Split-K flash decode of a draft tree on MLA, for every GPU from sm_80 on (mma.sync, ldmatrix, cp.async; two KV
// tiles in flight fit the 99 KB of shared memory that a block gets on sm_120).
//
// One block takes kRows query rows (token, head) of one request and one split of its KV, 32 positions a step. K and V
// are the same tile, loaded once. Query rows are the N side of both products, where the granule is 8 and not 16:
//
//   S^T [32 positions, kRows] = K [32, 576] . Q^T     8 warps = 4 slices of the 576 dimensions x 2 halves of the tile;
//                                                     Q stays in registers, the 4 partial sums meet in shared memory
//   P   = softmax rows        warp w owns rows w, w + 8, ..; lane = position
//   O^T [512, kRows]   += V^T [512, 32] . P^T         warp w owns 64 of the 512 dimensions, sums stay in registers
#pragma once

#include "device.cuh"
#include "kernel.h"
#include "portable/ptx.cuh"

namespace tv {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

template <int kRows>
struct Tile {
  static constexpr int kStages = 2;  // KV tiles in shared memory
  static constexpr int kN8 = kRows / 8;
  static constexpr int kSlices = 4;  // of the key dimension, one a warp
  static constexpr int kSliceSteps = kKeyDim / 16 / kSlices;
  static constexpr int kKvBytes = kTile * kKeyDim * 2;  // one stage
  static constexpr int kScoreStride = kTile + 4;        // floats a row of partial scores; conflict-free both ways
  static constexpr int kScoreBytes = kSlices * kRows * kScoreStride * 4;
  static constexpr int kProbStride = kTile + 8;  // elements a row of P; conflict-free for ldmatrix
  static constexpr int kProbBytes = kRows * kProbStride * 2;
  static constexpr int kSmemBytes = kStages * kKvBytes + kScoreBytes + kProbBytes + 2 * kRows * 4;
  static_assert(kRows % 8 == 0 && kRows <= kMaxRowTile);
  static_assert(kKeyDim % (16 * kSlices) == 0 && kWarps == 2 * kSlices && kTile == 32);
  static_assert(kSmemBytes <= 99 * 1024, "sm_120, sm_89 and sm_86 give a block 99 KB");
};

// Byte offset of 16-byte chunk c of row r in a KV stage. Rows are 1152 bytes apart, a multiple of the 128 bytes that
// span all banks, so chunks are permuted within their group of 8 by the row.
__device__ __forceinline__ uint32_t kv_offset(int r, int c) { return r * (kKeyDim * 2) + ((c ^ (r & 7)) << 4); }

// Brings KV rows of a split into the stages. Warp w loads positions 4w .. 4w + 3 of each tile; lanes 0..3 hold their
// slots, fetched half a step ahead. Fetching right after load_tile would be earlier still, but then the first mma of
// the step waits for it: the compiler tracks the queries, loaded before the loop, with the same scoreboard.
template <typename T>
struct KvLoader {
  const TvVerifyParams& p;
  const Request& req;
  Range range;
  int warp, lane;
  int slot;  // of position next + 4 * warp + lane % 4
  int next;  // first position of the tile that `slot` belongs to

  __device__ __forceinline__ KvLoader(const TvVerifyParams& p, const Request& req, Range range, int warp, int lane)
      : p(p), req(req), range(range), warp(warp), lane(lane), slot(0), next(range.begin) {
    fetch_slot();
  }

  __device__ __forceinline__ void fetch_slot() {
    const int pos = next + 4 * warp + (lane & 3);
    slot = 0;
    if (pos < range.end) {
      const bool draft = p.out_cache_loc != nullptr && pos >= req.len.prefix;
      slot = draft ? int(p.out_cache_loc[req.first_token + pos - req.len.prefix])
                   : int(load_index(p.kv_indices, p.kv_index_bytes, req.kv_begin + pos));
    }
  }

  // `chunks` times 512 bytes of one row, from chunk `first` of the lane on.
  template <int kChunks>
  __device__ __forceinline__ void copy(uint32_t stage, int i, int first) const {
    const int row = 4 * warp + i;
    const T* src = static_cast<const T*>(p.kv) + int64_t(__shfl_sync(0xffffffffu, slot, i)) * p.kv_stride + first * 8;
    const uint32_t dst = stage + kv_offset(row, first);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) cp_async16(dst + 512 * c, src + 256 * c, next + row < range.end);
  }

  // Starts the copy of the next tile (nothing past the end) and closes its group.
  __device__ __forceinline__ void load_tile(uint32_t stage) {
    if (next < range.end) {
#pragma unroll
      for (int i = 0; i < 4; ++i) copy<2>(stage, i, lane);
      copy<1>(stage, lane >> 3, 64 + (lane & 7));
      next += kTile;
    }
    cp_async_commit();
  }
};

// A warp's slice of Q as B fragments, one for each 16 dimensions and 8 rows. Rows past the request are zero.
template <typename T, typename C>
__device__ __forceinline__ void load_queries(const TvVerifyParams& p, const Request& req, int row0, int slice, int lane,
                                             uint32_t (&q)[C::kSliceSteps][C::kN8][2]) {
  const T* q_nope = static_cast<const T*>(p.q_nope);
  const T* q_pe = static_cast<const T*>(p.q_pe);
#pragma unroll
  for (int j = 0; j < C::kN8; ++j) {
    const int row = row0 + 8 * j + (lane >> 2);
    const int64_t token = req.first_token + row / p.heads;
    const int64_t head = row % p.heads;
    const bool valid = row < req.rows;
    const T* nope = q_nope + token * p.q_nope_stride_t + head * p.q_nope_stride_h;
    const T* pe = q_pe + token * p.q_pe_stride_t + head * p.q_pe_stride_h - kLatent;
#pragma unroll
    for (int s = 0; s < C::kSliceSteps; ++s) {
      const int dim = (slice * C::kSliceSteps + s) * 16;
      const T* src = (dim < kLatent ? nope : pe) + dim + 2 * (lane & 3);
      q[s][j][0] = valid ? *reinterpret_cast<const uint32_t*>(src) : 0;
      q[s][j][1] = valid ? *reinterpret_cast<const uint32_t*>(src + 8) : 0;
    }
  }
}

// Scores of 16 positions over one slice of the dimensions, for all rows, into score[slice][row][position].
template <typename T, typename C>
__device__ __forceinline__ void slice_scores(uint32_t stage, float* score, int slice, int half, int lane,
                                             const uint32_t (&q)[C::kSliceSteps][C::kN8][2]) {
  float acc[C::kN8][4] = {};
#pragma unroll
  for (int s = 0; s < C::kSliceSteps; ++s) {
    uint32_t k[4];
    ldmatrix_x4(k, stage + kv_offset(half * 16 + (lane & 15), (slice * C::kSliceSteps + s) * 2 + (lane >> 4)));
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) mma_16x8x16<T>(acc[j], k, q[s][j]);
  }
  float* dst = score + (slice * C::kN8 * 8 + 2 * (lane & 3)) * C::kScoreStride + half * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < C::kN8; ++j) {
    float* d = dst + 8 * j * C::kScoreStride;
    d[0] = acc[j][0];
    d[C::kScoreStride] = acc[j][1];
    d[8] = acc[j][2];
    d[C::kScoreStride + 8] = acc[j][3];
  }
}

// Scale of a raw score into base-2 logits, with the optional soft cap.
struct Logits {
  float scale, inner, cap;

  __device__ __forceinline__ explicit Logits(const TvVerifyParams& p) {
    constexpr float kLog2e = 1.4426950408889634f;
    cap = p.logit_cap > 0 ? p.logit_cap * kLog2e : 0;
    inner = p.logit_cap > 0 ? p.sm_scale / p.logit_cap : 0;
    scale = p.sm_scale * kLog2e;
  }
  template <int kN>
  __device__ __forceinline__ void apply(float (&x)[kN]) const {
    if (cap > 0) {
#pragma unroll
      for (int j = 0; j < kN; ++j) x[j] = cap * tanhf(x[j] * inner);
    } else {
#pragma unroll
      for (int j = 0; j < kN; ++j) x[j] *= scale;
    }
  }
};

// The score of one row and position: the sum over the slices, always in the same order.
template <typename C>
__device__ __forceinline__ float gather_score(const float* score, int row, int lane) {
  float sum = 0;
#pragma unroll
  for (int s = 0; s < C::kSlices; ++s) sum += score[(s * C::kN8 * 8 + row) * C::kScoreStride + lane];
  return sum;
}

// Online softmax of the rows a warp owns: max is uniform, sum is a lane's own share.
template <typename T, typename C>
struct RowState {
  float max[C::kN8], sum[C::kN8];

  __device__ __forceinline__ RowState() {
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) max[j] = -INFINITY, sum[j] = 0;
  }

  // Takes the logits of one tile, leaves P and the factor for what was summed before; true where a maximum moved.
  __device__ __forceinline__ bool update(const float (&x)[C::kN8], int warp, int lane, T* prob, float* row_scale) {
    float top[C::kN8];
    bool moved = false;
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) top[j] = fmaxf(max[j], warp_max(x[j]));
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) {
      const int row = 8 * j + warp;
      const float base = top[j] == -INFINITY ? 0 : top[j];  // nothing visible so far
      const T p = from_float<T>(exp2_approx(x[j] - base));
      const float scale = exp2_approx(max[j] - base);
      moved |= top[j] != max[j];
      max[j] = top[j];
      sum[j] = sum[j] * scale + to_float(p);
      prob[row * C::kProbStride + lane] = p;
      if (lane == 0) row_scale[row] = scale;
    }
    return moved;
  }
};

// O^T += V^T . P^T over one tile for 64 dimensions.
template <typename T, typename C>
__device__ __forceinline__ void accumulate(uint32_t stage, uint32_t prob, int warp, int lane,
                                           float (&o)[4][C::kN8][4]) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    uint32_t pb[C::kN8][2];
    const uint32_t src = prob + ((lane & 7) * C::kProbStride + k * 16 + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
    for (int j = 0; j + 1 < C::kN8; j += 2) {
      uint32_t r[4];
      ldmatrix_x4(r, src + (8 * j + 8 * (lane >> 4)) * C::kProbStride * 2);
      pb[j][0] = r[0], pb[j][1] = r[1], pb[j + 1][0] = r[2], pb[j + 1][1] = r[3];
    }
    if constexpr (C::kN8 % 2) ldmatrix_x2(pb[C::kN8 - 1], src + 8 * (C::kN8 - 1) * C::kProbStride * 2);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t v[4];
      ldmatrix_x4_trans(v,
                        stage + kv_offset(k * 16 + (lane & 7) + (lane >> 4) * 8, warp * 8 + m * 2 + ((lane >> 3) & 1)));
#pragma unroll
      for (int j = 0; j < C::kN8; ++j) mma_16x8x16<T>(o[m][j], v, pb[j]);
    }
  }
}

// A single split also answers for rows that nothing covers: padding requests and tokens past the last request.
template <typename T>
__device__ __forceinline__ void zero_rows(const TvVerifyParams& p, int first_row, int rows) {
  for (int i = threadIdx.x; i < rows * kLatent; i += blockDim.x) {
    const int row = first_row + i / kLatent;
    const int64_t at = int64_t(row / p.heads) * p.out_stride_t + int64_t(row % p.heads) * p.out_stride_h;
    static_cast<T*>(p.out)[at + i % kLatent] = from_float<T>(0);
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void verify_block(const TvVerifyParams& p) {
  using C = Tile<kRows>;
  const int b = blockIdx.z, split = blockIdx.y, row0 = blockIdx.x * kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (b == p.bs) {  // launched for a single split only
    for (int row = covered_rows(p) + row0; row < p.tokens * p.heads; row += gridDim.x * kRows) {
      zero_rows<T>(p, row, min(kRows, p.tokens * p.heads - row));
    }
    return;
  }
  const Request req(p, b);
  const int rows = min(req.rows - row0, kRows);
  if (rows <= 0) return;
  const Range range = split_range(req.len.kv, p.nsplit, split);
  if (range.begin >= range.end) {
    if (p.nsplit == 1) zero_rows<T>(p, req.first_token * p.heads + row0, rows);
    return;
  }

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t stages = smem_address(smem);
  float* score = reinterpret_cast<float*>(smem + C::kStages * C::kKvBytes);
  T* prob = reinterpret_cast<T*>(smem + C::kStages * C::kKvBytes + C::kScoreBytes);
  float* row_scale = reinterpret_cast<float*>(smem + C::kStages * C::kKvBytes + C::kScoreBytes + C::kProbBytes);

  if (p.nsplit > 1) launch_dependents();
  KvLoader<T> loader(p, req, range, warp, lane);
  const int slice = warp % C::kSlices, half = warp / C::kSlices;
  uint32_t q[C::kSliceSteps][C::kN8][2];
  load_queries<T, C>(p, req, row0, slice, lane, q);  // in flight while the first slots arrive

  loader.load_tile(stages);
  loader.fetch_slot();

  const Mask mask(p, req, b);
  const Logits logits(p);
  RowState<T, C> state;
  float o[4][C::kN8][4] = {};

  int current = 0;
  for (int tile = range.begin; tile < range.end; tile += kTile) {
    const uint32_t stage = stages + current * C::kKvBytes;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here; the previous one, its scores and its P are no longer read
    current ^= 1;
    loader.load_tile(stages + current * C::kKvBytes);

    slice_scores<T, C>(stage, score, slice, half, lane, q);
    loader.fetch_slot();
    __syncthreads();

    float x[C::kN8];
#pragma unroll
    for (int j = 0; j < C::kN8; ++j) x[j] = gather_score<C>(score, 8 * j + warp, lane);
    logits.apply(x);
    if (tile + kTile > min(range.end, req.len.prefix)) {  // the last tiles only: past the end, or among the draft
      const int pos = tile + lane;
#pragma unroll
      for (int j = 0; j < C::kN8; ++j) {
        const int row = row0 + 8 * j + warp;
        const bool draft = pos >= req.len.prefix && pos < range.end && row < row0 + rows;
        const bool visible = draft ? mask.visible(row / p.heads, pos - req.len.prefix) : pos < range.end;
        if (!visible) x[j] = -INFINITY;
      }
    }
    const bool moved = state.update(x, warp, lane, prob, row_scale);
    if (__syncthreads_or(moved)) {  // multiplying by 1 changes no bit, so skipping it does not either
#pragma unroll
      for (int j = 0; j < C::kN8; ++j) {
        const float2 s = *reinterpret_cast<const float2*>(row_scale + 8 * j + 2 * (lane & 3));
#pragma unroll
        for (int m = 0; m < 4; ++m) o[m][j][0] *= s.x, o[m][j][1] *= s.y, o[m][j][2] *= s.x, o[m][j][3] *= s.y;
      }
    }
    accumulate<T, C>(stage, smem_address(prob), warp, lane, o);
  }

  // row_scale is still read by slower warps: results go to the slots behind it.
  float* row_inverse = row_scale + kRows;
#pragma unroll
  for (int j = 0; j < C::kN8; ++j) {
    const int row = 8 * j + warp;
    const float sum = warp_sum(state.sum[j]);
    if (lane == 0) {
      row_inverse[row] = sum > 0 ? __frcp_rn(sum) : 0;
      if (p.nsplit > 1 && row < rows) {
        *Workspace(p).partial_lse(int64_t(req.first_token) * p.heads + row0 + row, split) =
            sum > 0 ? state.max[j] + __log2f(sum) : -INFINITY;
      }
    }
  }
  __syncthreads();

#pragma unroll
  for (int j = 0; j < C::kN8; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = 8 * j + 2 * (lane & 3) + odd;
      if (row >= rows) continue;
      const float inverse = row_inverse[row];
      const int dim = warp * 64 + (lane >> 2);
      if (p.nsplit > 1) {
        float* dst = Workspace(p).partial(int64_t(req.first_token) * p.heads + row0 + row, split) + dim;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          dst[m * 16] = o[m][j][odd] * inverse;
          dst[m * 16 + 8] = o[m][j][odd + 2] * inverse;
        }
      } else {
        const int64_t token = req.first_token + (row0 + row) / p.heads, head = (row0 + row) % p.heads;
        T* dst = static_cast<T*>(p.out) + token * p.out_stride_t + head * p.out_stride_h + dim;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          dst[m * 16] = from_float<T>(o[m][j][odd] * inverse);
          dst[m * 16 + 8] = from_float<T>(o[m][j][odd + 2] * inverse);
        }
      }
    }
  }
}

}  // namespace tv

// Defines the kernel and its host-side description for one element type and row tile.
#define TV_VERIFY_KERNEL(NAME, TYPE, ROWS)                                                                       \
  extern "C" __global__ void __launch_bounds__(tv::kThreads, 1) NAME(const __grid_constant__ TvVerifyParams p) { \
    tv::verify_block<TYPE, ROWS>(p);                                                                             \
  }                                                                                                              \
  extern const tv::Kernel NAME##_info;                                                                           \
  const tv::Kernel NAME##_info = {#NAME, reinterpret_cast<const void*>(NAME), tv::Tile<ROWS>::kSmemBytes, tv::kThreads};
