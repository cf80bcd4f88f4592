// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup where the pool holds fp8. It widens rows on their way to the tile, exactly, so that the
// computing warpgroups find what a pool of the queries' type would give them.
//
// cp.async brings raw bytes to shared memory; the thread that asked for them waits for its own copies, widens, and
// stores two chunks of a panel for each 16 bytes. Nobody else sees raw bytes, so there is no barrier between. They lie
//   apart, a tile ahead, where shared memory has the room (up to 32 query rows): loads are in flight whether or not a
//     tile's place is free, 36 KB a multiprocessor, about what the read rate times the latency asks for;
//   else in the place of their own panel, at the first of the two chunks they become, once that place is free. A tile's
//     loads then wait for the products with the last one there, as those of the other pools do, and half the bytes
//     arrive sooner than all of them.
// Not in registers: a load's place in a loop of loads is lost to the compiler, which waits for all of them at once; and
// 72 query rows leave the loader 40 registers, less than a third of a tile.
//
// Order of events. A thread's copies: cp.async.wait_group, by that thread. The tile: every thread's stores, its arrival
// at the third's barrier, the wait of a computing warp there, that warp's fence.proxy.async, wgmma; cp.async, an
// ordinary access too, comes the same way. PTX asks for one fence on it; the loader has none of its own, for it
// compiles to a membar, and copies are in flight. The next tile in the place: a warp waits for its wgmmas before it
// gives their part back, and copies and stores to the part come after the wait for all warps to have done so.
#pragma once

#include "device.cuh"
#include "hopper/loader.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/softmax.cuh"

namespace tv::hopper {

// 16 bytes of the pool to elements of T, two chunks. F: E4M3 or E5M2.
template <typename T, typename F>
__device__ __forceinline__ void widen(const uint4& raw, uint4 (&chunk)[2]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t wide[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    halves_of(F(), words[i / 2], wide[i], wide[i + 1]);
    const float2 low = unpack2(__half(), wide[i]), high = unpack2(__half(), wide[i + 1]);
    wide[i] = pack2(T(), low.x, low.y), wide[i + 1] = pack2(T(), high.x, high.y);
  }
  chunk[0] = {wide[0], wide[1], wide[2], wide[3]};
  chunk[1] = {wide[4], wide[5], wide[6], wide[7]};
}

// T: of the tile. F: of the pool.
template <typename T, typename F, typename S>
struct Fp8Loader {
  using Rows = RowsOf<kRawLanes>;
  static_assert(!(S::kRawApart && S::kOddLastFirst), "the next tile's panels come in the order of this one's");

  const TvVerifyParams& p;
  uint32_t smem;
  uint32_t raw;                      // where this thread's raw bytes lie apart
  uint32_t chunk, second;            // where its chunks lie in a panel
  int left;                          // rows of the tile being loaded from this thread's first one on
  const uint8_t* src[Rows::kCount];  // its rows there

  __device__ __forceinline__ Fp8Loader(const TvVerifyParams& p, uint32_t smem)
      : p(p),
        smem(smem),
        raw(smem + S::kRaw + raw_slot(0, threadIdx.x)),
        chunk(smem + panel_offset(raw_row(threadIdx.x), raw_chunk(threadIdx.x))),
        second(smem + panel_offset(raw_row(threadIdx.x), raw_chunk(threadIdx.x) + 1)) {}

  __device__ __forceinline__ void point(const Rows& rows, int tile, int end) {
    left = end - tile - raw_row(threadIdx.x);
#pragma unroll
    for (int i = 0; i < Rows::kCount; ++i) {
      src[i] = static_cast<const uint8_t*>(p.kv) + int64_t(rows.slot[i]) * p.kv_stride + raw_byte(0, threadIdx.x);
    }
  }

  // Panel at place i in the order of loading.
  template <bool kLastFirst>
  __device__ __forceinline__ static constexpr int panel(int i) {
    return kLastFirst ? kPanels - 1 - i : i;
  }
  __device__ __forceinline__ static uint32_t place(int stage, int j) {
    return j == kRopePanel ? S::kRope + stage * S::kRopeStride : S::kValues + (stage * kRopePanel + j) * kPanelBytes;
  }
  __device__ __forceinline__ uint32_t raw_at(int stage, int j, int row) const {
    return S::kRawApart ? raw + raw_slot(2 * j + row, 0) : chunk + place(stage, j) + row * Rows::kApart * 128;
  }

  // Waits until the place of panel j, at place i in the order, may be written. The rope panel goes with the last part.
  template <bool kLastFirst>
  __device__ __forceinline__ void wait_for_place(int stage, int parity, int i) const {
    constexpr int kPart = kRopePanel / S::kParts;  // panels
    const auto part = [](int i) { return min(panel<kLastFirst>(i) / kPart, S::kParts - 1); };
    if (i > 0 && part(i) == part(i - 1)) return;
    barrier_wait(smem + S::kFree + 8 * (S::kParts * stage + part(i)), parity);
  }

  // The third of a tile's panels that is number kThirdAt in the order of loading: one group of copies.
  template <bool kLastFirst, int kThirdAt>
  __device__ __forceinline__ void copy_third(int stage, int parity) const {
#pragma unroll
    for (int i = kThirdAt * kThird; i < (kThirdAt + 1) * kThird; ++i) {
      const int j = panel<kLastFirst>(i);
      if (!S::kRawApart) wait_for_place<kLastFirst>(stage, parity, i);
#pragma unroll
      for (int row = 0; row < Rows::kCount; ++row) {
        cp_async16_narrow(raw_at(stage, j, row), src[row] + raw_byte(j, 0), row * Rows::kApart < left);
      }
    }
    cp_async_commit();
  }

  // Widens it, once all but the youngest kBehind groups of copies have landed.
  template <bool kLastFirst, int kThirdAt, int kBehind>
  __device__ __forceinline__ void widen_third(int stage, int parity) const {
    cp_async_wait<kBehind>();
    constexpr int kPieces = kThird * Rows::kCount;
    const auto panel_of = [](int piece) { return panel<kLastFirst>(kThirdAt * kThird + piece / Rows::kCount); };
    uint4 from[2];  // a piece, and the one after it
    from[0] = load_shared16(raw_at(stage, panel_of(0), 0));
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int j = panel_of(piece), row = piece % Rows::kCount, next = min(piece + 1, kPieces - 1);
      if (S::kRawApart && row == 0) wait_for_place<kLastFirst>(stage, parity, kThirdAt * kThird + piece / Rows::kCount);
      if (next > piece) from[next % 2] = load_shared16(raw_at(stage, panel_of(next), next % Rows::kCount));
      uint4 chunks[2];
      widen<T, F>(from[piece % 2], chunks);
      const uint32_t at = place(stage, j) + row * Rows::kApart * 128;
      store_shared16(chunk + at, chunks[0]);
      store_shared16(second + at, chunks[1]);
    }
    barrier_arrive(smem + S::kFull + 8 * (3 * stage + panel<kLastFirst>(kThirdAt * kThird) / kThird));
  }

  // A tile whose raw bytes have been asked for; asks for the next one's.
  __device__ __forceinline__ void tile_apart(int stage, int parity, bool more) const {
    widen_third<false, 0, 2>(stage, parity);
    copy_next<0>(more);
    widen_third<false, 1, 2>(stage, parity);
    copy_next<1>(more);
    widen_third<false, 2, 2>(stage, parity);
    copy_next<2>(more);
  }
  template <int kThirdAt>
  __device__ __forceinline__ void copy_next(bool more) const {
    if (more) {
      copy_third<false, kThirdAt>(0, 0);
    } else {
      cp_async_commit();  // so that groups count alike
    }
  }

  // A tile by way of its own place. All of it is asked for before any is widened: what the last copies wait for is free
  // by the time that the first have landed.
  template <bool kLastFirst>
  __device__ __forceinline__ void tile_in_place(int stage, int parity) const {
    copy_third<kLastFirst, 0>(stage, parity);
    copy_third<kLastFirst, 1>(stage, parity);
    copy_third<kLastFirst, 2>(stage, parity);
    widen_third<kLastFirst, 0, 2>(stage, parity);
    widen_third<kLastFirst, 1, 1>(stage, parity);
    widen_third<kLastFirst, 2, 0>(stage, parity);
  }

  __device__ __forceinline__ void run(const Request& req, Range range, Rows rows) {
    if constexpr (S::kRawApart) {
      point(rows, range.begin, range.end);
      rows.fetch(p, req, range.begin + kTile, range.end);
      copy_third<false, 0>(0, 0), copy_third<false, 1>(0, 0), copy_third<false, 2>(0, 0);
    }
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int tile = range.begin; tile < range.end; tile += kTile) {
      const int loaded = S::kRawApart ? tile + kTile : tile;
      point(rows, loaded, range.end);
      rows.fetch(p, req, loaded + kTile, range.end);
      if constexpr (S::kRawApart) {
        tile_apart(stage, parity, loaded < range.end);
      } else if (S::kOddLastFirst && stage) {
        tile_in_place<true>(stage, parity);
      } else {
        tile_in_place<false>(stage, parity);
      }
      stage ^= 1;
      parity ^= stage ^ 1;
    }
  }
};

// What the loading warpgroup does, by the pool's type.
template <typename T, typename Key, typename S>
struct Loading {
  using First = Rows;
  static constexpr int kRegisters = kLoaderRegisters;
  __device__ __forceinline__ static void run(const TvVerifyParams& p, const Request& req, Range range, First first,
                                             uint32_t smem) {
    load<T, S>(p, req, range, first, smem);
  }
};

template <typename T, typename S>
struct Loading<T, Fp8, S> {
  using First = RowsOf<kRawLanes>;
  static constexpr int kRegisters = kLoaderRegisters;
  __device__ __forceinline__ static void run(const TvVerifyParams& p, const Request& req, Range range, First first,
                                             uint32_t smem) {
    if (p.kv_dtype == TV_FP8_E5M2) {
      Fp8Loader<T, E5M2, S>(p, smem).run(req, range, first);
    } else {
      Fp8Loader<T, E4M3, S>(p, smem).run(req, range, first);
    }
  }
};

}  // namespace tv::hopper
