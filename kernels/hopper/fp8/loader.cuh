// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup where the pool holds fp8: rows go to shared memory as they are, several tiles ahead.
#pragma once

#include "device.cuh"
#include "hopper/fp8/shape.cuh"
#include "hopper/loader.cuh"
#include "hopper/ptx.cuh"

namespace tv::hopper::fp8 {

constexpr int kLanes = 4;  // that take 64 bytes of a row
using Rows = RowsOf<kLanes>;

// Where the rows of a tile and of the one after it lie: what says so is a trip to memory away, as they are themselves.
struct TwoTiles {
  Rows now, next;

  __device__ __forceinline__ void fetch(const TvVerifyParams& p, const Request& req, int tile, int end) {
    now.fetch(p, req, tile, end);
    next.fetch(p, req, tile + kTile, end);
  }
};

template <typename S>
__device__ __forceinline__ void load(const TvVerifyParams& p, const Request& req, Range range, TwoTiles rows,
                                     uint32_t smem) {
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t at = smem + S::kTiles + tile_offset(row, lane);
  static_assert(Rows::kApart % 8 == 0, "so that they share their swizzle");
  int stage = 0, parity = 1;
#pragma unroll 1
  for (int tile = range.begin; tile < range.end; tile += kTile) {
    const uint8_t* src[Rows::kCount];
#pragma unroll
    for (int i = 0; i < Rows::kCount; ++i) {
      src[i] = static_cast<const uint8_t*>(p.kv) + int64_t(rows.now.slot[i]) * p.kv_stride + lane * 16;
    }
    rows.now = rows.next;
    rows.next.fetch(p, req, tile + 2 * kTile, range.end);
    const int left = range.end - tile - row;  // rows past the end are zero
    const uint32_t dst = at + stage * kTileBytes;
#pragma unroll
    for (int j = 0; j < kPanels; ++j) {
      constexpr int kPart = kRopePanel / S::kParts;  // panels
      if (j % kPart == 0 && j < kRopePanel) barrier_wait(smem + S::kFree + 8 * (S::kParts * stage + j / kPart), parity);
#pragma unroll
      for (int i = 0; i < Rows::kCount; ++i) {
        cp_async16_narrow(dst + i * Rows::kApart * kRowBytes + j * 64, src[i] + j * 64, i * Rows::kApart < left);
      }
      if (j % kThird == kThird - 1) barrier_arrive_after_copies(smem + S::kFull + 8 * (3 * stage + j / kThird));
    }
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  cp_async_wait_all();
}

}  // namespace tv::hopper::fp8
