// SPDX-License-Identifier: Apache-2.0
// Brings KV rows of a split into the stages of shared memory, tile by tile.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

// A position's slot must be known before its row can be copied. So slots are copied too, a batch of them ahead, into a
// table of two batches: no copy of a row waits for its slot, and no register holds it meanwhile.
template <typename T, typename C>
struct KvLoader {
  static constexpr int kMine = C::kTile / kWarps;          // rows of a tile that a warp copies
  static constexpr int kBatchTiles = kThreads / C::kTile;  // a batch is a slot a thread
  static_assert(C::kTile <= 4 * kWarps && kBatchTiles >= C::kStages && 2 * kThreads * 8 == C::kSlotBytes);

  const TvVerifyParams& p;
  const Request& req;
  Range range;
  uint8_t* slots;  // 8 bytes each, of which the lower 4 count
  int warp, lane;

  __device__ __forceinline__ KvLoader(const TvVerifyParams& p, const Request& req, Range range, uint8_t* slots,
                                      int warp, int lane)
      : p(p), req(req), range(range), slots(slots), warp(warp), lane(lane) {}

  // Starts the copy of a batch of slots.
  __device__ __forceinline__ void load_slots(int batch) const {
    const int at = kThreads * batch + int(threadIdx.x), pos = range.begin + at;
    if (pos >= range.end) return;
    const uint32_t dst = smem_address(slots + at % (2 * kThreads) * 8);
    if (p.out_cache_loc != nullptr && pos >= req.len.prefix) {
      cp_async_small<8>(dst, p.out_cache_loc + req.first_token + pos - req.len.prefix);
    } else if (p.kv_index_bytes == 8) {
      cp_async_small<8>(dst, static_cast<const int64_t*>(p.kv_indices) + req.kv_begin + pos);
    } else {
      cp_async_small<4>(dst, static_cast<const int32_t*>(p.kv_indices) + req.kv_begin + pos);
    }
  }

  // kChunks times 512 bytes of a row, from chunk `first` of the lane on.
  template <int kChunks>
  __device__ __forceinline__ void copy(uint32_t stage, int tile, int row, int first) const {
    const int at = tile * C::kTile + row;
    const bool valid = range.begin + at < range.end;
    const uint32_t slot = valid ? *reinterpret_cast<const uint32_t*>(slots + at % (2 * kThreads) * 8) : 0;
    const T* src = static_cast<const T*>(p.kv) + uint64_t(slot) * uint32_t(p.kv_stride) + first * 8;
    const uint32_t dst = stage + kv_offset(row, first);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) cp_async16(dst + 512 * c, src + 256 * c, valid);
  }

  // Starts the copy of a tile; `loaded` hears of its end from every thread. The first tile of a batch brings the slots
  // of the next batch along, in the place of those of the batch before, which are all used by now.
  __device__ __forceinline__ void load_tile(int tile, uint32_t stage, uint32_t loaded) const {
    if (tile % kBatchTiles == 0) load_slots(tile / kBatchTiles + 1);
#pragma unroll
    for (int i = 0; i < kMine; ++i) copy<2>(stage, tile, kMine * warp + i, lane);
    if (4 * warp < C::kTile) copy<1>(stage, tile, 4 * warp + (lane >> 3), 64 + (lane & 7));  // 8 chunks a row remain
    mbarrier_arrive_after_copies(loaded);
  }
};

}  // namespace tv::portable
