// SPDX-License-Identifier: Apache-2.0
// Split-K flash decode of a draft tree on MLA for Hopper: wgmma with the query rows on the N side, where the granule is
// 8 and 72 rows (9 tokens of 8 heads) waste nothing.
//
//   S^T [64 positions, rows] = K [64, 576] . Q^T      one warpgroup a tile, the two take turns
//   P                          softmax over positions, through shared memory as [rows, 64]
//   O^T [512, rows]         += V^T [512, 64] . P^T     each warpgroup holds 256 of the 512 dimensions, for every tile
//
// K and V are one tile in shared memory, in panels of 64 dimensions. Scores start when the first third of a tile has
// landed, and each warpgroup gives its half of V back when its product is done, so that no load waits for a whole tile.
#pragma once

#include "device.cuh"
#include "hopper/block.cuh"
#include "hopper/output.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/softmax.cuh"
#include "hopper/wgmma.cuh"

namespace tv::hopper {

template <typename T, int kRows>
struct Math {
  using S = Shape<kRows>;
  static constexpr int kN8 = S::kN8;
  using Loads = Loading<T, S>;
  using Queries = CopiedQueries<T, S>;
  static constexpr int kMoves = 1, kUnsettled = 2;

  const TvVerifyParams& p;
  uint8_t* shared;
  uint32_t smem;
  int group;    // 0, 1: which warpgroup, and which half of the dimensions
  int current;  // which of the two reference arrays holds
  int warp, lane;
  float s[kN8][4];         // scores of this group's tile
  float o[kHalf][kN8][4];  // sums over all tiles
  Sums<kN8> sums;          // over this group's tiles

  __device__ __forceinline__ Math(const TvVerifyParams& p, uint8_t* shared, int group)
      : p(p), shared(shared), smem(smem_address(shared)), group(group), current(0) {
    warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kHalf; ++m) {
#pragma unroll
      for (int j = 0; j < kN8; ++j) o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0;
    }
  }

  __device__ __forceinline__ static void work(const TvVerifyParams& p, uint8_t* shared, int group) {
    Math math(p, shared, group);
    math.run();
    math.finish();
  }

  __device__ __forceinline__ const Job& job() const { return *reinterpret_cast<const Job*>(shared + S::kJob); }
  __device__ __forceinline__ void sync_group() const { sync_threads<kWarpgroup>(1 + group); }
  __device__ __forceinline__ float* reference(int which) const {
    return reinterpret_cast<float*>(shared + S::kReference) + which * kRows;
  }
  // What a tile did to the references: kMoves, kUnsettled (some row has seen nothing yet).
  __device__ __forceinline__ volatile int* moved(int t) const {
    return reinterpret_cast<volatile int*>(shared + S::kMoved) + (t & 1);
  }
  __device__ __forceinline__ uint32_t prob(int t) const { return smem + S::kRope + (t & 1) * kPanelBytes; }
  __device__ __forceinline__ uint32_t full(int t, int third) const {
    return smem + S::kFull + 8 * (3 * (t & 1) + third);
  }
  __device__ __forceinline__ uint32_t prob_full(int t) const { return smem + S::kProbFull + 8 * (t & 1); }
  __device__ __forceinline__ uint32_t free(int t, int half) const { return smem + S::kFree + 8 * (2 * (t & 1) + half); }
  __device__ __forceinline__ static int parity(int t) { return t >> 1 & 1; }

  // Issues the scores of tile t over a third of the dimensions, which has landed.
  __device__ __forceinline__ void issue_scores(int t, int third) {
    fence_async_reads();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kThird; ++i) {
      const int j = third * kThird + i;
      const uint32_t key = smem + (j == kRopePanel ? S::kRope + (t & 1) * S::kRopeStride
                                                   : S::kValues + ((t & 1) * kRopePanel + j) * kPanelBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<T, kRows, false>::run(s, descriptor(key + 32 * k), descriptor(smem + j * S::kQPanelBytes + 32 * k),
                                    third + i + k > 0);
      }
    }
    wgmma_commit();
  }

  // Issues this group's half of P . V of tile t.
  __device__ __forceinline__ void issue_values(int t) {
    const uint32_t value = smem + S::kValues + ((t & 1) * kRopePanel + group * kHalf) * kPanelBytes;
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kHalf; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<T, kRows, true>::run(o[m], descriptor(value + m * kPanelBytes + 2048 * k), descriptor(prob(t) + 32 * k),
                                   true);
      }
    }
    wgmma_commit();
  }

  // Waits for them and gives back what they read. The last of them leave time to add up the rows' sums.
  __device__ __forceinline__ void finish_values(int t, bool is_last) {
    if (is_last) add_sums();
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(free(t, group));
  }

  // Moves the references where a logit of this tile has outgrown them. The exponents s follow, and so do the sums.
  __device__ __forceinline__ int move_references(int t, float* maxima) {
    const int i = threadIdx.x % kWarpgroup;
    const float* before = reference(current);
    float* after = reference(current ^ 1);
    partial_maxima(s, maxima, warp, lane);
    sync_group();
    bool unsettled = false;
    if (i < kRows) {
      float top = maxima[i];
#pragma unroll
      for (int k = 1; k < S::kMaxima; ++k) top = fmaxf(top, maxima[k * kRows + i]);
      after[i] = next_reference(before[i], top);
      unsettled = after[i] == -INFINITY;
    }
    unsettled = sync_threads_or<kWarpgroup>(1 + group, unsettled);
    move_exponents(before, after, lane, s);
    follow_references(t);
    return unsettled ? kMoves | kUnsettled : kMoves;
  }

  // The references have moved with tile t: so do the sums over the tiles before.
  __device__ __forceinline__ void follow_references(int t) {
    wgmma_wait<0>();  // the compiler wants no product in flight where it touches sums
    if (t > 0) sums.rescale(reference(current), reference(current ^ 1), lane, o);
    current ^= 1;
  }

  // Softmax of this group's tile t, from s to P in shared memory. Where it is masked, threads below kRows have the bits
  // of the positions that their row sees.
  __device__ __forceinline__ void softmax(int t, bool masked, uint64_t bits) {
    const int i = threadIdx.x % kWarpgroup;
    uint8_t* scratch = shared + S::kRope + (t & 1) * S::kRopeStride;  // dead once all four warps have their scores
    to_exponents(p, reference(current), lane, s);
    if (masked) {
      uint64_t* visible = reinterpret_cast<uint64_t*>(scratch + S::kScratchVisible);
      sync_group();
      if (i < kRows) visible[i] = bits;
      sync_group();
      hide(s, reinterpret_cast<const uint32_t*>(visible), warp, lane);
    }
    const bool unsettled = t == 0 || (*moved(t - 1) & kUnsettled);
    const bool moves = sync_threads_or<kWarpgroup>(1 + group, largest(s) > kLazyRescale || unsettled);
    const int news = moves ? move_references(t, reinterpret_cast<float*>(scratch)) : 0;
    uint32_t packed[kN8][2];
    sums.template exponentials<T>(s, packed);
    // P of both tiles share some room: the other group must have read the last one, as this one has.
    if (S::kBetween > 0 && t > 0) barrier_wait(free(t - 1, 1 - group), parity(t - 1));
    store_prob(packed, prob(t), warp, lane);
    if (i == 0) *moved(t) = news;
    fence_async_reads();
    barrier_arrive(prob_full(t));
  }

  // Scores of tile t, each third as it lands.
  __device__ __forceinline__ void issue_all_scores(int t) {
#pragma unroll
    for (int third = 0; third < 3; ++third) {
      barrier_wait(full(t, third), parity(t));
      issue_scores(t, third);
    }
  }

  // This group's part in tile t of the other.
  __device__ __forceinline__ void follow(int t, bool is_last) {
    barrier_wait(prob_full(t), parity(t));
    if (*moved(t) & kMoves) follow_references(t);
    issue_values(t);
    finish_values(t, is_last);
  }

  // Tiles go in pairs, one for each group. The tensor cores' turns: scores of the even tile; scores of the odd one,
  // while the even one has its softmax; values of the even one; values of the odd one.
  __device__ __forceinline__ void run() {
    const int begin = job().begin, i = threadIdx.x % kWarpgroup;
    const int tiles = uniform(ceil_div(job().end - begin, kTile));
    const int unmasked = (min(job().end, job().prefix) - begin) / kTile;  // tiles before the end and the draft
    barrier_wait(smem + S::kQueryFull, 0);
    int t = group;
#pragma unroll 1
    for (; t < tiles; t += 2) {
      uint64_t bits = 0;
      if (t >= unmasked && i < kRows) bits = visible_bits(p, job(), i, blockIdx.x * kRows + i, begin + t * kTile);
      if (group == 0 && t > 0) follow(t - 1, false);
      issue_all_scores(t);
      if (group == 1) {
        follow(t - 1, false);
      } else {
        wgmma_wait<0>();
      }
      softmax(t, t >= unmasked, bits);
      barrier_wait(prob_full(t), parity(t));
      issue_values(t);
      finish_values(t, t == tiles - 1);
    }
    if (t == tiles && t > 0) follow(t - 1, true);  // the last tile was the other group's
  }

  // The rows' sums over both groups' tiles. They meet where Q was: this thread has seen P of the last two tiles, so
  // nobody scores any more.
  __device__ __forceinline__ void add_sums() {
    const int i = threadIdx.x - kWarpgroup, slot = job().slot;
    float* partial = reinterpret_cast<float*>(shared);
    sums.store(partial, i / 32, lane);
    sync_threads<2 * kWarpgroup>(3);
    if (i / 32 < (2 * kRows + 31) / 32) {  // two threads a row
      const int row = min(i / 2, kRows - 1);
      float total = 0;
#pragma unroll 8
      for (int k = i % 2; k < S::kSums; k += 2) total += partial[k * kRows + row];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      inverse()[row] = total > 0 ? __frcp_rn(total) : 0;
      if (slot >= 0 && i / 2 < job().rows && i % 2 == 0) {
        *Workspace(p).partial_lse(slot, blockIdx.x * kRows + row) =
            total > 0 ? reference(current)[row] + __log2f(total) : -INFINITY;
      }
    }
    sync_threads<2 * kWarpgroup>(3);
  }
  __device__ __forceinline__ float* inverse() const { return reinterpret_cast<float*>(shared + S::kInverse); }

  // Normalises and writes the rows.
  __device__ __forceinline__ void finish() {
    const int row0 = blockIdx.x * kRows, slot = job().slot, rows = job().rows;
    const int row = 2 * (lane % 4), dim = group * (kLatent / 2) + warp * 16 + lane / 4;
    if (slot >= 0) {
      // Straight to the workspace: eight lanes fill a sector of 32 bytes.
      float* dst = Workspace(p).partial(slot, row0 + row) + dim;
      each_row<kLatent>([&](int at, int i, float v) {
        if (row + i < rows) __stcg(dst + at, v);
      });
      return;
    }
    // Through shared memory, so that stores are whole lines, once nobody multiplies any more.
    sync_threads<2 * kWarpgroup>(3);
    float* dst = reinterpret_cast<float*>(shared + S::kOutRows) + row * S::kOutStride + dim;
    each_row<S::kOutStride>([&](int at, int, float v) { dst[at] = v; });
    write_rows<T, S::kOutStride>(p, job(), row0, shared + S::kOutRows);
  }

  // Calls write(offset, row, value) for all sums of this thread, normalised: rows and offsets from its first one, where
  // rows lie kStride apart.
  template <int kStride, typename Write>
  __device__ __forceinline__ void each_row(Write write) {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(inverse() + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kHalf; ++m) {
        const int at = 8 * j * kStride + m * 64;
        write(at, 8 * j, o[m][j][0] * scale.x);
        write(at + kStride, 8 * j + 1, o[m][j][1] * scale.y);
        write(at + 8, 8 * j, o[m][j][2] * scale.x);
        write(at + 8 + kStride, 8 * j + 1, o[m][j][3] * scale.y);
      }
    }
  }
};

}  // namespace tv::hopper

#define TV_HOPPER_KERNEL(NAME, TYPE, ROWS) TV_HOPPER_KERNEL_OF(NAME, TYPE, tv::hopper::Math<TYPE, ROWS>)
