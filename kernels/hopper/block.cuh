// SPDX-License-Identifier: Apache-2.0
// A block of the Hopper path, whichever way round it multiplies: finds its work, loads Q, sets barriers up, and splits
// into one warpgroup that loads and two that compute.
#pragma once

#include "device.cuh"
#include "hopper/loader.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "kernel.h"

namespace tv::hopper {

template <typename S>
__device__ __forceinline__ void init_barriers(uint32_t smem, float* reference) {
  const int i = threadIdx.x;
  if (i < 3 * S::kStages) barrier_init(smem + S::kFull + 8 * i, kWarpgroup);
  if (i < S::kParts * S::kStages) barrier_init(smem + S::kFree + 8 * i, kWarpgroup / 32);
  if (i < 2) barrier_init(smem + S::kProbFull + 8 * i, kWarpgroup);
  if (i == 0) barrier_init(smem + S::kQueryFull, 2 * kWarpgroup);
  if (i < S::kQueryRows) reference[i] = -INFINITY;  // before the first tile
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

template <typename T, typename Math>
__device__ __forceinline__ void verify_block(const TvVerifyParams& p) {
  using S = typename Math::S;
  using Loads = typename Math::Loads;
  constexpr int kRows = S::kQueryRows;
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
  const int rows = min(req.rows - row0, kRows), active = active_splits(req.len.kv, split.cut);
  if (rows <= 0 || split.index >= max(active, 1)) return;
  if (active == 0) return zero_rows<T>(p, req.first_token * p.heads + row0, rows);
  const Range range = split_range(req.len.kv, split.cut, split.index);

  if (!writes_directly(p)) launch_dependents();

  // The first loads are under way before anything else is set up.
  const uint32_t smem = smem_address(shared);
  const int role = uniform(threadIdx.x / kWarpgroup);
  typename Loads::First first = {};
  typename Math::Queries queries;
  if (role == 0) {
    first.fetch(p, req, range.begin, range.end);
  } else {
    queries.load(p, req, row0, smem);
  }
  init_barriers<S>(smem, reinterpret_cast<float*>(shared + S::kReference));
  if (threadIdx.x == 0) {
    const int slot = active > 1 ? split.first + split.index : -1;
    *reinterpret_cast<Job*>(shared + S::kJob) = {range.begin,     range.end, req.len.prefix, split.b, rows,
                                                 req.first_token, slot};
  }
  __syncthreads();
  if (role == 0) {
    keep_registers<Loads::kRegisters>();
    Loads::run(p, req, range, first, smem);
  } else {
    take_registers<kMathRegisters>();
    queries.land(shared, smem);
    Math::work(p, shared, role - 1);
  }
}

}  // namespace tv::hopper

// Defines the kernel and its host-side description for one element type and the class that computes. Without machine
// code for sm_90a there is no function.
#if defined(TV_HOST_ONLY)
#define TV_HOPPER_FUNCTION(NAME, TYPE, ...) static constexpr const void* NAME##_function = nullptr;
#else
#define TV_HOPPER_FUNCTION(NAME, TYPE, ...)                             \
  extern "C" __global__ void __launch_bounds__(tv::hopper::kThreads, 1) \
      NAME(const __grid_constant__ TvVerifyParams p) {                  \
    tv::hopper::verify_block<TYPE, __VA_ARGS__>(p);                     \
  }                                                                     \
  static const void* const NAME##_function = reinterpret_cast<const void*>(NAME);
#endif
#define TV_HOPPER_KERNEL_OF(NAME, TYPE, ...)  \
  TV_HOPPER_FUNCTION(NAME, TYPE, __VA_ARGS__) \
  extern const tv::Kernel NAME##_info;        \
  const tv::Kernel NAME##_info = {#NAME, NAME##_function, __VA_ARGS__::S::kSmemBytes, tv::hopper::kThreads};
