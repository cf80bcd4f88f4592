// SPDX-License-Identifier: Apache-2.0
// Split-K flash decode of a draft tree on MLA, for every GPU from sm_80 on (mma.sync, ldmatrix, cp.async).
//
// One block takes kRows query rows (token, head) of one request and one split of its KV, kTile positions a step. K and
// V are the same tile, loaded once. Query rows are the N side of both products, where the granule is 8 and not 16:
//
//   S^T [kTile, kRows] = K [kTile, 576] . Q^T         every warp a slice of the 576 dimensions; Q stays in registers,
//                                                     the partial sums meet in shared memory            (scores.cuh)
//   P   = softmax                                     8 rows a warp; those without rows go on           (softmax.cuh)
//   O^T [512, kRows]  += V^T [512, kTile] . P^T       every warp 64 of the 512 dimensions; sums in registers
//                                                                                                       (values.cuh)
// The products of one tile run while the softmax of the next one is worked out. No barrier stops the whole block: warps
// tell by an mbarrier what they have done, and wait where they need it, half a step later. Step t:
//
//   wait for tile t            loaded[stage]: the copies of the tile arrive at it
//   S(t)                       in registers
//   wait for P(t - 1)          probs_ready: the softmax warps arrive. They have read the scores of t - 1 as well
//   partial sums of S(t) to shared memory
//   arrive at scores_ready     nor does the warp need V(t - 2) and P(t - 2) any more
//   O += V(t - 1) . P(t - 1), first half
//   wait for scores_ready
//   second half, and woven into it: P(t), or by the warps that have no rows, copies of a further tile to where t - 2
//   was
#pragma once

#include "device.cuh"
#include "kernel.h"
#include "portable/loader.cuh"
#include "portable/scores.cuh"
#include "portable/softmax.cuh"
#include "portable/values.cuh"

namespace tv::portable {

// Zeros into rows [first, first + rows) of the output.
template <typename T>
__device__ __forceinline__ void zero_rows(const TvVerifyParams& p, int first, int rows) {
  for (int row = first + threadIdx.x / 32; row < first + rows; row += kWarps) {
    T* dst = static_cast<T*>(p.out) + int64_t(row / p.heads) * p.out_stride_t + row % p.heads * p.out_stride_h;
    for (int dim = threadIdx.x % 32 * 4; dim < kLatent; dim += 128) store4<T>(dst + dim, {0, 0, 0, 0});
  }
}

// `T`: of the queries and the output. `C`: a Shape.
template <typename T, typename C>
__device__ __forceinline__ void verify_block(const TvVerifyParams& p) {
  using Math = typename C::Pool::template Math<T>;
  const int row0 = blockIdx.x * C::kRows, slot = blockIdx.y;
  const int warp = uniform(threadIdx.x / 32), lane = kept(threadIdx.x % 32);
  const Split split = Split::of_block(p, slot);
  if (split.b >= p.bs) {
    if (slot < p.splits || !writes_directly(p)) return;
    for (int row = covered_rows(p) + row0; row < p.tokens * p.heads; row += gridDim.x * C::kRows) {
      zero_rows<T>(p, row, min(C::kRows, p.tokens * p.heads - row));
    }
    return;
  }
  const Request req(p, split.b);
  const int rows = min(req.rows - row0, C::kRows);
  const Range range = split_range(req.len.kv, split.cut, split.index);
  if (rows <= 0) return;
  if (range.begin >= range.end) {
    if (split.index == 0) zero_rows<T>(p, req.first_token * p.heads + row0, rows);
    return;
  }
  const bool direct = uniform(range.end - range.begin == req.len.kv);  // the request has no other split
  const int tiles = uniform(ceil_div(range.end - range.begin, C::kTile));

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t stages = kept(smem_address(smem));
  const uint32_t loaded = smem_address(smem) + C::kLoadedAt;  // not kept(): arrivals after copies need it uniform
  const uint32_t scores_ready = stages + C::kScoresReadyAt, probs_ready = stages + C::kProbsReadyAt;
  float* const scores = reinterpret_cast<float*>(smem + C::kScoresAt);
  Math* const probs = reinterpret_cast<Math*>(smem + C::kProbsAt);
  float* const factors = reinterpret_cast<float*>(smem + C::kFactorsAt);
  Row* const table = reinterpret_cast<Row*>(smem + C::kRowsAt);
  const uint32_t moved = stages + C::kMovedAt;
  const auto stage_of = [&](uint32_t tile) { return stages + tile % C::kStages * C::kStageBytes; };
  const auto loaded_of = [&](uint32_t tile) { return loaded + tile % C::kStages * 8; };
  const auto prob_of = [&](uint32_t tile) { return probs + tile % 2 * (C::kProbBytes / int(sizeof(Math))); };
  const auto factors_of = [&](uint32_t tile) { return factors + tile % 2 * C::kRows; };

  // The second half of the warps has fewer rows where those don't divide evenly: softmax begins there.
  const int eight = (warp + kWarps / 2) % kWarps;
  const bool has_rows = eight < C::kN8, copies = eight >= kWarps - C::kLoaders;

  if (!writes_directly(p)) launch_dependents();
  KvLoader<C> loader(p, req, range, smem + C::kSlotsAt, eight - (kWarps - C::kLoaders), lane);
  loader.load_slot(0, threadIdx.x);
  Scores<T, C> score(warp, lane);
  const RowPlace place(p, req);
  score.load_queries(p, req, place, row0, smem + C::kQueriesAt);  // in flight while the first slots arrive
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) mbarrier_init(loaded + 8 * i, 32 * C::kLoaders);
    mbarrier_init(scores_ready, kWarps);
    mbarrier_init(probs_ready, C::kN8);
    store_shared(moved, -2);
  }
  // P(-1) is zero: the step before the first tile adds nothing.
  for (int i = threadIdx.x; i < C::kProbBytes / 8; i += kThreads) reinterpret_cast<uint2*>(prob_of(1))[i] = {0, 0};
  if (threadIdx.x < C::kRows) {
    const int row = min(row0 + int(threadIdx.x), req.rows - 1);
    table[threadIdx.x].out = place.at(row, p.out_stride_t, p.out_stride_h);
    table[threadIdx.x].node = place.node(row);
  }
  // Until the first tile has its softmax there are no factors: each warp leaves its largest element of Q there.
  uint32_t* const largest = reinterpret_cast<uint32_t*>(factors);
  if constexpr (C::Pool::kFp8) {
    const uint32_t mine = score.largest_query();
    if (lane == 0) largest[warp] = mine;
  }
  cp_async_wait_all();
  __syncthreads();
  if (copies) {
#pragma unroll 1
    for (int i = 0; i < min(tiles, C::kStages); ++i) loader.load_tile(i, stage_of(i), loaded_of(i));
  }

  float sm_scale = p.sm_scale;
  if constexpr (C::Pool::kFp8) {
    const QueryUnit unit(largest);
    score.narrow_queries(unit.factor, smem + C::kQueriesAt);
    sm_scale *= p.k_scale * unit.inverse;
  }
  const Logits logits(p, sm_scale);
  Softmax<Math, C> softmax(eight, lane);
  // Tiles from here on reach past the prefix or the end; of those before, all is visible.
  const int first_masked = uniform(max(min(range.end, req.len.prefix) - range.begin, 0) / C::kTile);
  Values<Math, C> values(warp, lane);
  // P of a tile is there, and its first fragments with it; true where what was summed before needs new factors.
  const auto wait_for_probs = [&](int tile, uint32_t prob) {
    mbarrier_wait(probs_ready, tile & 1);
    values.load_probs(prob, 0);
    return __any_sync(0xffffffffu, load_shared(moved) == tile);
  };

  uint32_t stage = stages, before = stages;  // tiles t and t - 1; at first, the step adds 0 times tile 0
  uint32_t prob = smem_address(prob_of(1));  // P(t - 1)
  mbarrier_wait(loaded, 0);
  score.load_first(stage);
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    const bool special = t >= first_masked || logits.has_cap;
    score.multiply(stage);
    values.template load<0>(before);
    if (C::kSharedSteps == 0) values.template load<1>(before);
    const bool rescale = wait_for_probs(t - 1, prob);
    score.store(scores);
    mbarrier_arrive_warp(scores_ready, lane);
    if (C::kSharedSteps > 0) values.template load<1>(before);  // now that the scores leave room for it
    if (rescale) values.scale(factors_of(t + 1));  // by 1 would change no bit, so leaving it out does not either

    values.template multiply<0>();
    values.template load_more_probs<0>(prob);
    values.template load<2>(before);
    const int next = uniform(t - 2 + C::kStages);
    const bool has_next = copies && t >= 2 && next < tiles;
    const uint32_t following = min(t + 1, tiles - 1);
    const uint32_t following_loaded = kept(loaded_of(following)), parity = kept(following / C::kStages % 2);
    values.template multiply<1>();
    values.template load_more_probs<1>(prob);
    values.template load<3>(before);
    before = stage;
    stage = kept(stage_of(following));
    const uint32_t prob_before = prob;
    prob = kept(smem_address(prob_of(t)));
    mbarrier_wait(scores_ready, t % 2);
    if (has_rows) {
      float x[4 * C::kK16];
      softmax.gather(scores, x);
      values.template multiply<2>();
      values.template load_more_probs<2>(prob_before);
      float scale = logits.scale;
      if (special) {
        const int pos = range.begin + t * C::kTile;
        uint64_t seen = ~uint64_t(0);
        if (t >= first_masked) {
          const Mask mask(p, req, opaque(split.b));
          seen = mask.window(table[softmax.row].node, req.n, pos - req.len.prefix) & low_bits(range.end - pos);
        }
        scale = softmax.special(logits, seen, x);
      }
      if (softmax.update(scale, x, prob_of(t), factors_of(t))) store_shared(moved, t);
      values.template multiply<3>();
      mbarrier_arrive_warp(probs_ready, lane);
    } else {
      values.template multiply<2>();
      values.template load_more_probs<2>(prob_before);
      if (has_next) loader.load_tile(next, stage_of(next), loaded_of(next));
      values.template multiply<3>();
    }
    mbarrier_wait(following_loaded, parity);
    score.load_first(stage);
  }
  values.template load<0>(before);
  values.template load<1>(before);
  if (wait_for_probs(tiles - 1, prob)) values.scale(factors_of(tiles - 1));
  values.template multiply<0>();
  values.template load_more_probs<0>(prob);
  values.template load<2>(before);
  values.template multiply<1>();
  values.template load_more_probs<1>(prob);
  values.template load<3>(before);
  values.template multiply<2>();
  values.template load_more_probs<2>(prob);
  values.template multiply<3>();

  // The sums go through shared memory, so that a store covers a whole stretch of a row.
  const float total = softmax.total();
  const int number = Split::number(p, slot);
  if (has_rows && softmax.quad == 0) {
    const float inverse = total > 0 ? reciprocal_approx(total) : 0;
    table[softmax.row].inverse = C::Pool::kFp8 ? inverse * p.k_scale : inverse;
    if (!direct && softmax.row < rows) {
      *Workspace(p).partial_lse(number, row0 + softmax.row) = total > 0 ? softmax.base + __log2f(total) : -INFINITY;
    }
  }
  __syncthreads();
  values.stage(reinterpret_cast<float*>(smem));
  __syncthreads();
  constexpr int kRowsAtOnce = 4 * kThreads / kLatent;
  const int dim = 4 * threadIdx.x % kLatent;
#pragma unroll 4
  for (int i = 0; i < C::kRows / kRowsAtOnce; ++i) {
    const int row = kRowsAtOnce * i + 4 * threadIdx.x / kLatent;
    const float f = table[row].inverse;
    float4 v = Values<Math, C>::staged_sums(reinterpret_cast<const float*>(smem), row, dim);
    v = {v.x * f, v.y * f, v.z * f, v.w * f};
    if (row >= rows) continue;
    if (direct) {
      store4<T>(static_cast<T*>(p.out) + table[row].out + dim, v);
    } else {
      *reinterpret_cast<float4*>(Workspace(p).partial(number, row0 + row) + dim) = v;
    }
  }
}

}  // namespace tv::portable

// Defines the kernel and its host-side description for one element type and shape, the last argument.
#if defined(TV_HOST_ONLY)
#define TV_VERIFY_FUNCTION(NAME, TYPE, ...) static const void* const NAME = nullptr;
#else
#define TV_VERIFY_FUNCTION(NAME, TYPE, ...)                               \
  extern "C" __global__ void __launch_bounds__(tv::portable::kThreads, 1) \
      NAME(const __grid_constant__ TvVerifyParams p) {                    \
    tv::portable::verify_block<TYPE, tv::portable::__VA_ARGS__>(p);       \
  }
#endif
#define TV_VERIFY_KERNEL(NAME, TYPE, ...)                                                                            \
  TV_VERIFY_FUNCTION(NAME, TYPE, __VA_ARGS__)                                                                        \
  extern const tv::Kernel NAME##_info;                                                                               \
  const tv::Kernel NAME##_info = {#NAME, reinterpret_cast<const void*>(NAME), tv::portable::__VA_ARGS__::kSmemBytes, \
                                  tv::portable::kThreads};
