// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel for many query rows: 64 of them on the M side of wgmma, where Q, P and the sums of a row stay with
// one warp and P need not pass through shared memory for the group that made it.
//
//   S [64 rows, 64 positions] = Q [64, 576] . K^T      one warpgroup a tile, the two take turns
//   P                          softmax along rows, within a quad of lanes
//   O [64, 512]              += P [64, 64] . V [64, 512]  each warpgroup holds 256 of the 512 dimensions, for every
//   tile
//
// The tensor cores always have work of one group while the other has its softmax, after FlashMLA's schedule
// (github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md). In turn: S of the even tile; S of the odd
// one, during the softmax of the even one; V of the even one, during the softmax of the odd one; V of the odd one.
#pragma once

#include "hopper/block.cuh"
#include "hopper/m64/shape.cuh"
#include "hopper/m64/softmax.cuh"
#include "hopper/output.cuh"
#include "hopper/wgmma.cuh"

namespace tv::hopper::m64 {

// What group kGroup does: the softmax of tiles kGroup, kGroup + 2, .. and dimensions 256 kGroup and up of all sums.
template <typename T, int kGroup>
struct Group {
  using S = Shape;

  const TvVerifyParams& p;
  uint8_t* shared;
  uint32_t smem;
  int warp, lane;
  uint32_t query[4][4];       // rope part of this warp's rows
  uint32_t prob[kN8 / 2][4];  // P of this group's tile
  float s[kN8][4];            // scores of it
  float o[kHalf * kN8][4];    // sums over all tiles
  float reference[2];         // of rows 16 warp + lane / 4 and + 8
  float sum[2];               // of P over this group's tiles, and this thread's positions

  __device__ __forceinline__ Group(const TvVerifyParams& p, uint8_t* shared)
      : p(p), shared(shared), smem(smem_address(shared)) {
    warp = uniform(threadIdx.x % kWarpgroup / 32), lane = threadIdx.x % 32;
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int j = 0; j < kHalf * kN8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;
  }

  __device__ __forceinline__ const Job& job() const { return *reinterpret_cast<const Job*>(shared + S::kJob); }
  __device__ __forceinline__ uint32_t prob_panel(int t) const { return smem + (t & 1 ? S::kQRope : S::kProb); }
  __device__ __forceinline__ float* references(int t) const {
    return reinterpret_cast<float*>(shared + S::kReference) + (t & 1) * S::kQueryRows + 16 * warp + lane / 4;
  }
  __device__ __forceinline__ uint32_t full(int t, int third) const {
    return smem + S::kFull + 8 * (3 * (t & 1) + third);
  }
  __device__ __forceinline__ uint32_t prob_full(int t) const { return smem + S::kProbFull + 8 * (t & 1); }
  __device__ __forceinline__ static int parity(int t) { return t >> 1 & 1; }
  // Odd tiles are loaded, scored and multiplied last panel first: what one product frees is what the next tile in its
  // place waits for first.
  __device__ __forceinline__ static constexpr int first_part(int t) { return t & 1; }
  static constexpr int kFirstThird = kGroup ? 2 : 0;

  // This group has no more use for one of its two parts of tile t. Each warp says so for itself once its product with
  // the part has ended. That product came after P of the tile, which the tile's own group published behind its scores:
  // so the part is read as K too, and so is the rope panel, which odd tiles load with their last part. P's place is
  // written again after the tile two further on has landed whole, which waits for all four parts.
  __device__ __forceinline__ void give_back(int t, int part) const {
    if (lane == 0) barrier_arrive(smem + S::kFree + 8 * (S::kParts * (t & 1) + 2 * kGroup + part));
  }
  // Both parts, as the products with them end, of which kBehind groups of products are younger.
  template <int kBehind>
  __device__ __forceinline__ void give_back(int t) const {
    wgmma_wait<kBehind + 1>();
    give_back(t, first_part(t));
    wgmma_wait<kBehind>();
    give_back(t, 1 - first_part(t));
  }

  __device__ __forceinline__ void load_query() {
    barrier_wait(smem + S::kQueryFull, 0);
    const uint32_t from = smem + S::kQRope + fragment_offset(warp, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) ldmatrix_x4(query[k], from ^ 32 * k);
  }

  // Issues the scores of tile t over a third of the dimensions, once it has landed.
  __device__ __forceinline__ void issue_scores(int t, int third) {
    barrier_wait(full(t, third), parity(t));
    fence_async_reads();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kThird; ++i) {
      const int j = third * kThird + i;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (j < kRopePanel) {
          const uint32_t key = smem + S::kValues + (kGroup * kRopePanel + j) * kPanelBytes;
          Wgmma<T, kTile, false>::run(s, descriptor(smem + j * S::kQPanelBytes + 32 * k), descriptor(key + 32 * k),
                                      third != kFirstThird || i + k > 0);
        } else {
          WgmmaScores<T>::run(s, query[k], descriptor(smem + S::kRope + kGroup * S::kRopeStride + 32 * k), true);
        }
      }
    }
    wgmma_commit();
  }

  // Issues P . V with part kPart of this group's half of a stage; P's operand for positions 16 k and up is prob_of(k).
  template <int kPart, typename P>
  __device__ __forceinline__ void issue_part(int stage, P prob_of) {
    const uint32_t part = smem + S::kValues + (stage * kRopePanel + kGroup * kHalf + 2 * kPart) * kPanelBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      WgmmaValues<T>::template run<kHalf * kN8 / 2 * kPart>(o, prob_of(k),
                                                            descriptor_of_panels(part + 2048 * k, kPanelBytes));
    }
    wgmma_commit();
  }

  // Both parts of tiles of group kOf.
  template <int kOf, typename P>
  __device__ __forceinline__ void issue_values(P prob_of) {
    wgmma_fence();
    issue_part<first_part(kOf)>(kOf, prob_of);
    issue_part<1 - first_part(kOf)>(kOf, prob_of);
  }

  // Issues this group's half of P . V of its own tile.
  __device__ __forceinline__ void issue_own_values() {
    issue_values<kGroup>([&](int k) -> const uint32_t (&)[4] { return prob[k]; });
  }

  // And of tile t of the other group, once it has its softmax.
  __device__ __forceinline__ void issue_other_values(int t) {
    barrier_wait(prob_full(t), parity(t));
    const float after[2] = {references(t)[0], references(t)[8]};
    if (__any_sync(0xffffffffu, after[0] != reference[0] || after[1] != reference[1])) {
      const float by[2] = {factor(reference[0], after[0]), factor(reference[1], after[1])};
      sum[0] *= by[0], sum[1] *= by[1];
      reference[0] = after[0], reference[1] = after[1];
      wgmma_wait<0>();  // the compiler wants no product in flight where it touches sums
      rescale(by);
    }
    const uint32_t panel = smem + (kGroup ? S::kProb : S::kQRope);
    issue_values<1 - kGroup>([&](int k) { return descriptor(panel + 32 * k); });
  }

  __device__ __forceinline__ void rescale(const float (&by)[2]) {
#pragma unroll
    for (int j = 0; j < kHalf * kN8; ++j) o[j][0] *= by[0], o[j][1] *= by[0], o[j][2] *= by[1], o[j][3] *= by[1];
  }

  // Softmax of tile t, from s to P, here and in shared memory. Returns whether references have moved, and by what
  // factor the sums over other tiles must follow.
  __device__ __forceinline__ bool softmax(int t, bool masked, uint64_t visible, float (&by)[2]) {
    to_exponents(p, reference, s);
    if (masked) hide(s, visible, lane);
    float top[2];
    largest(s, top);
    const bool unsettled = reference[0] == -INFINITY || reference[1] == -INFINITY;
    const bool moves = __any_sync(0xffffffffu, fmaxf(top[0], top[1]) > kLazyRescale || unsettled);
    by[0] = by[1] = 1;
    if (moves) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float after = next_reference(reference[row], quad_max(top[row]));
        const float step = finite(after) - finite(reference[row]);
        by[row] = factor(reference[row], after);
        sum[row] *= by[row];
        reference[row] = after;
#pragma unroll
        for (int j = 0; j < kN8; ++j) s[j][2 * row] -= step, s[j][2 * row + 1] -= step;
      }
    }
    exponentials<T>(s, prob, sum);
    const uint32_t to = prob_panel(t) + fragment_offset(warp, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) stmatrix_x4(to ^ 32 * k, prob[k]);
    if (lane % 4 == 0) references(t)[0] = reference[0], references(t)[8] = reference[1];
    fence_async_reads();
    barrier_arrive(prob_full(t));
    return moves;
  }

  __device__ __forceinline__ void run() {
    const int begin = job().begin;
    const int tiles = uniform(ceil_div(job().end - begin, kTile));
    const int unmasked = (min(job().end, job().prefix) - begin) / kTile;  // tiles before the end and the draft
    load_query();
    int t = kGroup;
#pragma unroll 1
    for (; t < tiles; t += 2) {
      uint64_t visible = 0;
      if (t >= unmasked) {
        const int row = 16 * warp + lane % 16;
        visible = visible_bits(p, job(), row, blockIdx.x * S::kQueryRows + row, begin + t * kTile);
      }
      if constexpr (kGroup == 0) {
        if (t > 0) issue_other_values(t - 1);
        issue_scores(t, 0);
        if (t > 0) give_back<1>(t - 1);  // behind them: a third of the scores
        issue_scores(t, 1);
        issue_scores(t, 2);
        wgmma_wait<0>();
      } else {
        issue_scores(t, 2);
        issue_scores(t, 1);
        issue_scores(t, 0);
        issue_other_values(t - 1);
        wgmma_wait<2>();  // the scores: the other tile's values are two groups
      }
      float by[2];
      const bool moves = softmax(t, t >= unmasked, visible, by);
      if constexpr (kGroup == 1) give_back<0>(t - 1);
      if (moves) rescale(by);
      issue_own_values();
      give_back<0>(t);
    }
    if (t == tiles && t > 0) {  // the last tile was the other group's
      issue_other_values(t - 1);
      wgmma_wait<0>();
    }
  }

  // Normalises and writes the rows.
  __device__ __forceinline__ void finish() {
    const int row0 = blockIdx.x * S::kQueryRows, row = 16 * warp + lane / 4, slot = job().slot, rows = job().rows;
    float* sums = reinterpret_cast<float*>(shared + S::kSums);
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    if (lane % 4 == 0) sums[kGroup * S::kQueryRows + row] = sum[0], sums[kGroup * S::kQueryRows + row + 8] = sum[1];
    sync_threads<2 * kWarpgroup>(3);  // and nobody multiplies any more: what held Q and V is free
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = sums[row + 8 * i] + sums[S::kQueryRows + row + 8 * i];
      inverse[i] = total > 0 ? __frcp_rn(total) : 0;
      if (kGroup == 0 && lane % 4 == 0 && slot >= 0 && row + 8 * i < rows) {
        *Workspace(p).partial_lse(slot, row0 + row + 8 * i) = total > 0 ? reference[i] + __log2f(total) : -INFINITY;
      }
    }
    const int dim = kGroup * (kLatent / 2) + 2 * (lane % 4);
    if (slot >= 0) {  // straight to the workspace: a quad of lanes fills a sector of 32 bytes
      write_halves<kLatent>(Workspace(p).partial(slot, row0 + row) + dim, rows - row, inverse);
      return;
    }
    float* staged = reinterpret_cast<float*>(shared);  // so that stores are whole lines
    write_halves<S::kOutStride>(staged + row * S::kOutStride + dim, kTile, inverse);
    write_rows<T, S::kOutStride>(p, job(), row0, shared);
  }

  // This thread's sums of its two rows, 8 apart, normalised: those of the next `rows` rows. Rows lie kStride apart.
  template <int kStride>
  __device__ __forceinline__ void write_halves(float* dst, int rows, const float (&inverse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * i >= rows) continue;
#pragma unroll
      for (int j = 0; j < kHalf * kN8; ++j) {
        *reinterpret_cast<float2*>(dst + 8 * i * kStride + 8 * j) = {o[j][2 * i] * inverse[i],
                                                                     o[j][2 * i + 1] * inverse[i]};
      }
    }
  }
};

template <typename T>
struct Math {
  using S = Shape;
  using Loads = Loading<T, S>;
  using Queries = CopiedQueries<T, S>;
  __device__ __forceinline__ static void work(const TvVerifyParams& p, uint8_t* shared, int group) {
    if (group == 0) {
      Group<T, 0> first(p, shared);
      first.run();
      first.finish();
    } else {
      Group<T, 1> second(p, shared);
      second.run();
      second.finish();
    }
  }
};

}  // namespace tv::hopper::m64
