// SPDX-License-Identifier: Apache-2.0
// The combine kernel on the emulated block (machine.h): all of kernels/combine.cuh, as it is.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_cpp.h"
#include "schedule.h"

template <typename V>
V __ldcg(const V* at) {
  return *at;
}

#include "combine.cuh"

namespace {

const TvVerifyParams* params;
tv::Meeting meeting;

template <typename T>
void thread() {
  tv::combine_block<T>(*params, meeting);
  emulator::finish_thread();
}

}  // namespace

// With `blocks` for each split. Null, or what went wrong.
extern "C" const char* tv_emulate_combine(const TvVerifyParams* p, int blocks, uint64_t seed) {
  static_assert(tv::kCombineThreads == emulator::kThreads);
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed;
  params = p;
  block.grid_x = blocks, block.grid_y = p->splits;
  for (block.y = 0; block.y < block.grid_y; ++block.y) {
    for (block.x = 0; block.x < block.grid_x; ++block.x) {
      memset(&meeting, 0xff, sizeof meeting);  // NaN
      emulator::run_block(p->dtype == TV_BF16 ? thread<__nv_bfloat16> : thread<__half>);
      if (block.error[0]) return block.error;
    }
  }
  return nullptr;
}
