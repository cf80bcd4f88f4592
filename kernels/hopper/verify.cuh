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
#include "hopper/loader.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/softmax.cuh"
#include "hopper/wgmma.cuh"
#include "kernel.h"

namespace tv::hopper {

template <typename T, int kRows>
struct Math {
  using S = Shape<kRows>;
  static constexpr int kN8 = S::kN8;
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

  // Waits for them and gives back what they read.
  __device__ __forceinline__ void finish_values(int t) {
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
  __device__ __forceinline__ void follow(int t) {
    barrier_wait(prob_full(t), parity(t));
    if (*moved(t) & kMoves) follow_references(t);
    issue_values(t);
    finish_values(t);
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
      if (group == 0 && t > 0) follow(t - 1);
      issue_all_scores(t);
      if (group == 1) {
        follow(t - 1);
      } else {
        wgmma_wait<0>();
      }
      softmax(t, t >= unmasked, bits);
      barrier_wait(prob_full(t), parity(t));
      issue_values(t);
      finish_values(t);
    }
    if (t == tiles && t > 0) follow(t - 1);  // the last tile was the other group's
  }

  // Normalises and writes the rows, through shared memory so that stores are whole lines.
  __device__ __forceinline__ void finish() {
    const int i = threadIdx.x - kWarpgroup, row0 = blockIdx.x * kRows, slot = job().slot, rows = job().rows;
    float* partial = reinterpret_cast<float*>(shared);
    float* inverse = reinterpret_cast<float*>(shared + S::kInverse);
    float* rows_out = reinterpret_cast<float*>(shared + S::kOutRows);
    sync_threads<2 * kWarpgroup>(3);  // nobody multiplies any more: what held Q and V is free
    sums.store(partial, i / 32, lane);
    sync_threads<2 * kWarpgroup>(3);
    if (i / 32 < (2 * kRows + 31) / 32) {  // two threads a row
      const int row = min(i / 2, kRows - 1);
      float total = 0;
#pragma unroll 8
      for (int k = i % 2; k < S::kSums; k += 2) total += partial[k * kRows + row];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      inverse[row] = total > 0 ? __frcp_rn(total) : 0;
      if (slot >= 0 && i / 2 < rows && i % 2 == 0) {
        *Workspace(p).partial_lse(slot, row0 + row) = total > 0 ? reference(current)[row] + __log2f(total) : -INFINITY;
      }
    }
    sync_threads<2 * kWarpgroup>(3);
    float* dst = rows_out + 2 * (lane % 4) * S::kOutStride + group * (kLatent / 2) + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(inverse + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kHalf; ++m) {
        dst[8 * j * S::kOutStride + m * 64] = o[m][j][0] * scale.x;
        dst[8 * j * S::kOutStride + m * 64 + S::kOutStride] = o[m][j][1] * scale.y;
        dst[8 * j * S::kOutStride + m * 64 + 8] = o[m][j][2] * scale.x;
        dst[8 * j * S::kOutStride + m * 64 + 8 + S::kOutStride] = o[m][j][3] * scale.y;
      }
    }
    if (slot >= 0) fence_async_reads();
    sync_threads<2 * kWarpgroup>(3);
    if (slot >= 0) {
      if (i < rows) {
        bulk_store(Workspace(p).partial(slot, row0 + i), smem + S::kOutRows + i * S::kOutStride * 4, kLatent * 4);
        bulk_store_wait();
      }
      return;
    }
    const int64_t first_token = job().first_token;
#pragma unroll 1
    for (int row = i / 32; row < rows; row += 8) {
      const float4* src = reinterpret_cast<const float4*>(rows_out + row * S::kOutStride) + lane;
      const int64_t token = first_token + (row0 + row) / p.heads, head = (row0 + row) % p.heads;
      uint2* dst = reinterpret_cast<uint2*>(static_cast<T*>(p.out) + token * p.out_stride_t + head * p.out_stride_h);
#pragma unroll
      for (int k = 0; k < kLatent / 128; ++k) {
        const float4 v = src[32 * k];
        dst[lane + 32 * k] = {pack2(T(), v.x, v.y), pack2(T(), v.z, v.w)};
      }
    }
  }
};

template <int kRows>
__device__ __forceinline__ void init_barriers(uint32_t smem, float* reference) {
  using S = Shape<kRows>;
  const int i = threadIdx.x;
  if (i < 3 * kStages) barrier_init(smem + S::kFull + 8 * i, kWarpgroup);
  if (i < 2 * kStages) barrier_init(smem + S::kFree + 8 * i, kWarpgroup / 32);
  if (i < kStages) barrier_init(smem + S::kProbFull + 8 * i, kWarpgroup);
  if (i == 0) barrier_init(smem + S::kQueryFull, 2 * kWarpgroup);
  if (i < kRows) reference[i] = -INFINITY;  // before the first tile
}

// A block without KV, or for rows that no request covers.
template <typename T>
__device__ __noinline__ void zero_rows(const TvVerifyParams& p, int first_row, int rows) {
  for (int i = threadIdx.x; i < rows * (kLatent / 4); i += kThreads) {
    const int row = first_row + i / (kLatent / 4);
    T* dst = static_cast<T*>(p.out) + int64_t(row / p.heads) * p.out_stride_t + int64_t(row % p.heads) * p.out_stride_h;
    reinterpret_cast<uint2*>(dst)[i % (kLatent / 4)] = {0, 0};
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void verify_block(const TvVerifyParams& p) {
  using S = Shape<kRows>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int row0 = blockIdx.x * kRows;
  const Split split = Split::of_block(p, blockIdx.y);
  if (split.b >= p.bs) {
    if (!writes_directly(p) || int(blockIdx.y) != p.splits) return;
    for (int row = covered_rows(p) + row0; row < p.tokens * p.heads; row += gridDim.x * kRows) {
      zero_rows<T>(p, row, min(kRows, p.tokens * p.heads - row));
    }
    return;
  }
  const Request req(p, split.b);
  const int rows = min(req.rows - row0, kRows), active = active_splits(req.len.kv, split.count);
  if (rows <= 0 || split.index >= max(active, 1)) return;
  if (active == 0) return zero_rows<T>(p, req.first_token * p.heads + row0, rows);
  const Range range = split_range(req.len.kv, split.count, split.index);

  if (!writes_directly(p)) launch_dependents();

  // The first loads are under way before anything else is set up.
  const uint32_t smem = smem_address(shared);
  const int role = uniform(threadIdx.x / kWarpgroup);
  Rows first = {};
  if (role == 0) {
    first.fetch(p, req, range.begin, range.end);
  } else {
    load_queries<T, kRows>(p, req, row0, smem);
  }
  init_barriers<kRows>(smem, reinterpret_cast<float*>(shared + S::kReference));
  if (threadIdx.x == 0) {
    const int slot = active > 1 ? split.first + split.index : -1;
    *reinterpret_cast<Job*>(shared + S::kJob) = {range.begin,     range.end, req.len.prefix, split.b, rows,
                                                 req.first_token, slot};
  }
  __syncthreads();
  if (role == 0) {
    keep_registers<kLoaderRegisters>();
    load<T, kRows>(p, req, range, first, smem);
  } else {
    take_registers<kMathRegisters>();
    barrier_arrive_after_copies(smem + S::kQueryFull);
    Math<T, kRows> math(p, shared, role - 1);
    math.run();
    math.finish();
  }
}

}  // namespace tv::hopper

// Defines the kernel and its host-side description for one element type and row tile. Without machine code for sm_90a
// there is no function.
#if defined(TV_HOST_ONLY)
#define TV_HOPPER_FUNCTION(NAME, TYPE, ROWS) static constexpr const void* NAME##_function = nullptr;
#else
#define TV_HOPPER_FUNCTION(NAME, TYPE, ROWS)                            \
  extern "C" __global__ void __launch_bounds__(tv::hopper::kThreads, 1) \
      NAME(const __grid_constant__ TvVerifyParams p) {                  \
    tv::hopper::verify_block<TYPE, ROWS>(p);                            \
  }                                                                     \
  static const void* const NAME##_function = reinterpret_cast<const void*>(NAME);
#endif
#define TV_HOPPER_KERNEL(NAME, TYPE, ROWS) \
  TV_HOPPER_FUNCTION(NAME, TYPE, ROWS)     \
  extern const tv::Kernel NAME##_info;     \
  const tv::Kernel NAME##_info = {#NAME, NAME##_function, tv::hopper::Shape<ROWS>::kSmemBytes, tv::hopper::kThreads};
