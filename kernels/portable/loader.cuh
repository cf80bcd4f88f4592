// SPDX-License-Identifier: Apache-2.0
// Brings KV rows of a split into the stages of shared memory, tile by tile.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

// A position's slot must be known before its row can be copied. So slots are copied too, a batch of them ahead, into a
// table of two batches: no copy of a row waits for its slot, and no register holds it meanwhile.
//
// A warp copies 4 rows at a time, 128 bytes of each at once: a lane needs one slot for all of its 9 copies, and those
// lie at fixed distances on both sides, since chunks are permuted within 128 bytes.
template <typename T, typename C>
struct KvLoader {
  static constexpr int kFours = C::kTile / 4;
  static constexpr int kMine = (kFours + C::kLoaders - 1) / C::kLoaders;  // fours of rows that a warp copies
  static constexpr int kThreadsHere = 32 * C::kLoaders;
  static constexpr int kBatchTiles = kThreads / C::kTile;  // a batch has kThreads slots
  static_assert(kBatchTiles >= C::kStages && 2 * kThreads * 8 == C::kSlotBytes);

  const TvVerifyParams& p;
  const Request& req;
  Range range;
  uint8_t* slots;  // 8 bytes each, of which the lower 4 count
  int loader, lane;

  // `loader`: number of the warp among those that copy.
  __device__ __forceinline__ KvLoader(const TvVerifyParams& p, const Request& req, Range range, uint8_t* slots,
                                      int loader, int lane)
      : p(p), req(req), range(range), slots(slots), loader(loader), lane(lane) {}

  // Starts the copy of slot `i` of a batch.
  __device__ __forceinline__ void load_slot(int batch, int i) const {
    const uint32_t at = kThreads * batch + i;
    const int pos = range.begin + at;
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

  // Starts the copy of a tile; `loaded` hears of its end from every thread that copies. The first tile of a batch
  // brings the slots of the next batch along, in the place of those of the batch before, which are all used by now.
  __device__ __forceinline__ void load_tile(int tile, uint32_t stage, uint32_t loaded) const {
    if (tile % kBatchTiles == 0) {
#pragma unroll 1
      for (int i = 32 * loader + lane; i < kThreads; i += kThreadsHere) load_slot(tile / kBatchTiles + 1, i);
    }
    const int chunk = lane & 7;
    const uint32_t row0 = 4 * loader + (lane >> 3), at0 = tile * C::kTile + row0;
    const uint8_t* const entry = slots + at0 % (2 * kThreads) * 8;  // a tile doesn't wrap around
    const uint32_t dst = stage + kv_offset(row0, chunk);
    const T* const base = static_cast<const T*>(p.kv) + chunk * 8;
    uint32_t slot[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (exists(i)) slot[i] = *reinterpret_cast<const uint32_t*>(entry + i * 4 * C::kLoaders * 8);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (!exists(i)) break;
      const bool valid = range.begin + int(at0) + i * 4 * C::kLoaders < range.end;
      const T* src = base + uint64_t(valid ? slot[i] : 0) * uint32_t(p.kv_stride);
      const int step = 4 * C::kLoaders * i;  // rows
      // Rows that are not a multiple of 8 apart are permuted otherwise: chunk ^ 4.
      const uint32_t to = step % 8 == 0 ? dst : (stage + kv_offset(row0, chunk ^ 4));
#pragma unroll
      for (int c = 0; c < kKeyDim / 64; ++c) cp_async16(to + step * kKeyDim * 2 + 128 * c, src + 64 * c, valid);
    }
    mbarrier_arrive_after_copies(loaded);
  }

  __device__ __forceinline__ bool exists(int i) const {
    return kFours % C::kLoaders == 0 || i + 1 < kMine || loader + i * C::kLoaders < kFours;
  }
};

}  // namespace tv::portable
