// SPDX-License-Identifier: Apache-2.0
// How many splits each request of a ragged batch gets, decided on the device. One block, a thread a request.
//
// Lengths count in units of kChunkUnit positions. With at most L units a split, request b has ceil(units_b / L) splits.
// The plan takes the smallest L, by bisection, for which they all fit into the places that run at once: the longest
// split, which everybody waits for, is as short as it can be. A split takes a place. Requests of at most L / 2 share
// places, filled to three quarters by those of at most L / 4 and to a half by the others. Blocks start in the order of
// their splits, so the longest come first, and the short ones end up where a multiprocessor falls idle.
//
// Integers only, so the same lengths give the same plan.
#include "device.cuh"
#include "kernel.h"

namespace tv {

constexpr int kPlanThreads = 1024;  // at most: the host launches as many warps as hold the requests
constexpr uint32_t kFullWarp = 0xffffffffu;

// Reduces over the block; `reduce` is one of the warp-wide reductions, for which 0 is neutral.
template <typename Reduce>
__device__ __forceinline__ int block_reduce(int x, Reduce reduce) {
  __shared__ int part[kPlanThreads / 32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  x = reduce(x);
  if (warps == 1) return x;
  if (lane == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  x = reduce(lane < warps ? part[lane] : 0);
  __syncthreads();
  return x;
}

__device__ __forceinline__ int block_sum(int x) {
  return block_reduce(x, [](int v) { return __reduce_add_sync(kFullWarp, v); });
}

__device__ __forceinline__ int block_max(int x) {
  return block_reduce(x, [](int v) { return __reduce_max_sync(kFullWarp, v); });
}

// Sum over this thread and those before it.
__device__ __forceinline__ int block_scan(int x) {
  __shared__ int part[kPlanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(kFullWarp, x, d);
    if (lane >= d) x += before;
  }
  if (lane == 31) part[warp] = x;
  __syncthreads();
  return x + __reduce_add_sync(kFullWarp, lane < warp ? part[lane] : 0);
}

// The smallest fitting length of a split.
__device__ __forceinline__ int longest_split(int units, int places) {
  const auto fits = [&](int most) {
    const bool is_short = 2 * units <= most;
    const int taken = block_sum(is_short ? 0 : ceil_div(units, most));
    const int shared = block_sum(is_short ? units * (4 * units <= most ? 4 : 6) : 0);  // in thirds of a unit
    return taken + ceil_div(shared, 3 * most) <= places;
  };
  const int longest = block_max(units), total = block_sum(units);
  int low = max(max(ceil_div(total, places), ceil_div(longest, kMaxSplits)), 1);
  int high = max(longest, low);  // a split each: nothing is left to share out
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (fits(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace tv

extern "C" __global__ void __launch_bounds__(tv::kPlanThreads) tv_plan(const __grid_constant__ TvPlanParams p) {
  __shared__ int lengths[tv::kPlanThreads], counts[tv::kPlanThreads];
  const int b = threadIdx.x;
  const bool real = b < p.bs;
  const int units = real ? tv::ceil_div(max(p.kv_indptr[b + 1] - p.kv_indptr[b], 0), tv::kChunkUnit) : 0;
  const int splits = max(tv::ceil_div(units, tv::longest_split(units, p.splits - p.bs + 1)), 1);

  const int length = tv::ceil_div(units, splits);
  lengths[b] = length;
  __syncthreads();
  int before = 0;  // requests that come earlier in the plan's order
  for (int other = 0; other < p.bs; ++other) {
    before += lengths[other] > length || (lengths[other] == length && other < b);
  }
  if (real) {
    counts[before] = splits;
    p.split_indptr[p.bs + 1 + before] = b;
  }
  __syncthreads();
  const int end = tv::block_scan(real ? counts[b] : 0);
  if (real) p.split_indptr[b + 1] = end;
  if (b == 0) p.split_indptr[0] = 0;
}

extern const tv::Kernel tv_plan_info;
const tv::Kernel tv_plan_info = {"tv_plan", reinterpret_cast<const void*>(tv_plan), 0, tv::kPlanThreads};
