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
// A warp copies 4 rows at a time, 128 bytes of each at once, or of an fp8 pool 8 rows and 64 bytes: a lane needs one
// slot for all of its 9 copies, and those lie at fixed distances on both sides, since chunks are permuted within those
// bytes.
template <typename C>
struct KvLoader {
  static constexpr int kAtOnce = C::kRowsAtOnce, kLanes = 32 / kAtOnce;  // rows, and lanes of a row
  static constexpr int kLaneBits = kLanes == 4 ? 2 : 3;
  static constexpr int kParts = C::kTile / kAtOnce;
  using Element = typename C::Pool::Element;
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kMine = (kParts + C::kLoaders - 1) / C::kLoaders;  // so many rows each that a warp copies
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
    const int chunk = lane & (kLanes - 1);
    const uint32_t row0 = kAtOnce * loader + (lane >> kLaneBits), at0 = tile * C::kTile + row0;
    const uint8_t* const entry = slots + at0 % (2 * kThreads) * 8;  // a tile doesn't wrap around
    const uint32_t dst = stage + C::kv_offset(row0, chunk);
    const Element* const base = static_cast<const Element*>(p.kv) + chunk * kChunk;
    uint32_t slot[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (exists(i)) slot[i] = *reinterpret_cast<const uint32_t*>(entry + i * kAtOnce * C::kLoaders * 8);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (!exists(i)) break;
      const bool valid = range.begin + int(at0) + i * kAtOnce * C::kLoaders < range.end;
      const Element* src = base + uint64_t(valid ? slot[i] : 0) * uint32_t(p.kv_stride);
      const int step = kAtOnce * C::kLoaders * i;  // rows
      // Rows that are not a multiple of 8 apart are permuted otherwise: chunk ^ 4.
      const uint32_t to = step % 8 == 0 ? dst : (stage + C::kv_offset(row0, chunk ^ 4));
#pragma unroll
      for (int c = 0; c < 9; ++c) copy(to + step * C::kRowBytes + 16 * kLanes * c, src + kChunk * kLanes * c, valid);
    }
    mbarrier_arrive_after_copies(loaded);
  }

  __device__ __forceinline__ bool exists(int i) const {
    return kParts % C::kLoaders == 0 || i + 1 < kMine || loader + i * C::kLoaders < kParts;
  }

  __device__ __forceinline__ static void copy(uint32_t dst, const void* src, bool valid) {
    if constexpr (C::Pool::kFp8) {
      cp_async16_narrow(dst, src, valid);
    } else {
      cp_async16(dst, src, valid);
    }
  }
};

}  // namespace tv::portable
