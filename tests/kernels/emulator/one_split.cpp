// SPDX-License-Identifier: Apache-2.0
// The smallest portable verify kernel on an emulated block, for steps of one split a request: nothing is left to merge.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_cpp.h"
#include "portable/verify.cuh"
#include "schedule.h"

namespace {

using Shape = tv::portable::Narrow<8>;

const TvVerifyParams* params;

void thread() {
  tv::portable::verify_block<__nv_bfloat16, Shape>(*params);
  emulator::finish_thread();
}

}  // namespace

// Null, or what went wrong. KV lies in `pool_bytes` from p->kv on.
extern "C" const char* tv_emulate_one_split(const TvVerifyParams* p, int64_t pool_bytes) {
  if (p->splits != p->bs || p->dtype != TV_BF16) return "the emulator has one split a request, and bf16";
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = 0, block.waits_hold = true;
  block.pool = static_cast<const uint8_t*>(p->kv), block.pool_bytes = pool_bytes;
  params = p;
  block.grid_x = tv::ceil_div(p->max_q * p->heads, Shape::kRows), block.grid_y = p->splits + 1;
  for (block.y = 0; block.y < block.grid_y; ++block.y) {
    for (block.x = 0; block.x < block.grid_x; ++block.x) {
      emulator::run_block(thread);
      if (block.error[0]) return block.error;
    }
  }
  return nullptr;
}
