// SPDX-License-Identifier: Apache-2.0
// What fills shared memory: Q once, then one warpgroup brings the KV tiles of the split, panel by panel. Rows lie
// anywhere in the pool, so they are gathered with cp.async: 8 lanes take 128 bytes of a row, and the copies themselves
// arrive on the panel's barrier.
#pragma once

#include "device.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"

namespace tv::hopper {

// Q, by the two warpgroups that have nothing else to do yet.
template <typename T, typename S>
__device__ __forceinline__ void load_queries(const TvVerifyParams& p, const Request& req, int row0, uint32_t smem) {
  constexpr int kAtOnce = 2 * kWarpgroup / 8;
  const int lane = threadIdx.x % 8, first = (threadIdx.x - kWarpgroup) / 8;
#pragma unroll
  for (int i = 0; i < (S::kQueryRows + kAtOnce - 1) / kAtOnce; ++i) {
    const int r = i * kAtOnce + first, row = row0 + r;
    if (r >= S::kQueryRows) break;
    const bool valid = row < req.rows;
    const int64_t token = valid ? req.first_token + row / p.heads : 0, head = valid ? row % p.heads : 0;
    const T* nope = static_cast<const T*>(p.q_nope) + token * p.q_nope_stride_t + head * p.q_nope_stride_h;
    const T* pe = static_cast<const T*>(p.q_pe) + token * p.q_pe_stride_t + head * p.q_pe_stride_h;
    const uint32_t dst = smem + panel_offset(r, lane);
#pragma unroll
    for (int j = 0; j < kRopePanel; ++j) cp_async16(dst + j * S::kQPanelBytes, nope + j * 64 + lane * 8, valid);
    cp_async16(dst + kRopePanel * S::kQPanelBytes, pe + lane * 8, valid);
  }
}

template <typename T, typename S>
struct CopiedQueries {
  __device__ __forceinline__ void load(const TvVerifyParams& p, const Request& req, int row0, uint32_t smem) const {
    load_queries<T, S>(p, req, row0, smem);
  }
  __device__ __forceinline__ void land(uint8_t*, uint32_t smem) const {
    barrier_arrive_after_copies(smem + S::kQueryFull);
  }
};

// The rows of a tile that a thread takes part in, where kLanes share a row.
template <int kLanes>
struct RowsOf {
  static constexpr int kCount = kTile * kLanes / kWarpgroup;
  static constexpr int kApart = kWarpgroup / kLanes;
  static_assert(kApart % 8 == 0, "so that they share their swizzle");
  int slot[kCount];

  __device__ __forceinline__ void fetch(const TvVerifyParams& p, const Request& req, int tile, int end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int pos = tile + i * kApart + int(threadIdx.x / kLanes);
      slot[i] = 0;
      if (pos < end) {
        const bool draft = p.out_cache_loc != nullptr && pos >= req.len.prefix;
        slot[i] = draft ? int(p.out_cache_loc[req.first_token + pos - req.len.prefix])
                        : int(load_index(p.kv_indices, p.kv_index_bytes, req.kv_begin + pos));
      }
    }
  }
};
using Rows = RowsOf<8>;  // elements of two bytes: 128 bytes of a row make a panel's

template <typename T>
__device__ __forceinline__ void load_panel(const T* const (&src)[Rows::kCount], int left, uint32_t dst, int panel) {
#pragma unroll
  for (int i = 0; i < Rows::kCount; ++i) {
    cp_async16(dst + i * Rows::kApart * 128, src[i] + panel * 64, i * Rows::kApart < left);
  }
}

// A tile, panel by panel into the places of the stage's last one, each once its part of V is free. The rope panel is
// no V: it goes with the last part.
template <typename T, typename S, bool kLastFirst>
__device__ __forceinline__ void load_tile(const T* const (&src)[Rows::kCount], int left, uint32_t smem, uint32_t at,
                                          int stage, int parity) {
  constexpr int kPart = kRopePanel / S::kParts;  // panels
  int free = -1;
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    const int j = kLastFirst ? kPanels - 1 - i : i, part = min(j / kPart, S::kParts - 1);
    if (part != free) barrier_wait(smem + S::kFree + 8 * (S::kParts * stage + part), parity);
    free = part;
    const int to =
        j == kRopePanel ? S::kRope + stage * S::kRopeStride : S::kValues + (stage * kRopePanel + j) * kPanelBytes;
    load_panel(src, left, smem + to + at, j);
    if (i % kThird == kThird - 1) barrier_arrive_after_copies(smem + S::kFull + 8 * (3 * stage + j / kThird));
  }
}

template <typename T, typename S>
__device__ __forceinline__ void load(const TvVerifyParams& p, const Request& req, Range range, Rows rows,
                                     uint32_t smem) {
  const uint32_t at = panel_offset(threadIdx.x / 8, threadIdx.x % 8);
  int stage = 0, parity = 1;
#pragma unroll 1
  for (int tile = range.begin; tile < range.end; tile += kTile) {
    const T* src[Rows::kCount];
#pragma unroll
    for (int i = 0; i < Rows::kCount; ++i) {
      src[i] = static_cast<const T*>(p.kv) + int64_t(rows.slot[i]) * p.kv_stride + threadIdx.x % 8 * 8;
    }
    rows.fetch(p, req, tile + kTile, range.end);
    const int left = range.end - tile - int(threadIdx.x / 8);  // rows past the end are zero
    if (S::kOddLastFirst && stage) {
      load_tile<T, S, true>(src, left, smem, at, stage, parity);
    } else {
      load_tile<T, S, false>(src, left, smem, at, stage, parity);
    }
    stage ^= 1;
    parity ^= stage ^ 1;
  }
  cp_async_wait_all();
}

// What the loading warpgroup does.
template <typename T, typename S>
struct Loading {
  using First = Rows;
  static constexpr int kRegisters = kLoaderRegisters;
  __device__ __forceinline__ static void run(const TvVerifyParams& p, const Request& req, Range range, First first,
                                             uint32_t smem) {
    load<T, S>(p, req, range, first, smem);
  }
};

}  // namespace tv::hopper
