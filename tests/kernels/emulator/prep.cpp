// SPDX-License-Identifier: Apache-2.0
// The entry to the emulator (machine.h) for kernels/prep.cuh: a launch's blocks, one after the other.
#include "cuda_cpp.h"

#undef __shared__
#define __shared__ static  // what it finds there is the block's before it
#include "prep.cuh"
#include "schedule.h"

namespace {

static_assert(tv::kPrepThreads == emulator::kThreads);

const TvPrepParams* params;

void thread() {
  tv::prep_block(*params);
  emulator::finish_thread();
}

}  // namespace

// Null, or what went wrong. `blocks`: of a request, any number serves.
extern "C" const char* tv_emulate_prep(const TvPrepParams* p, int blocks, uint64_t seed) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed, block.waits_hold = true;
  block.grid_x = blocks, block.grid_y = p->bs;
  params = p;
  for (block.y = 0; block.y < block.grid_y; ++block.y) {
    for (block.x = 0; block.x < block.grid_x && !block.error[0]; ++block.x) emulator::run_block(thread);
  }
  return block.error[0] ? block.error : nullptr;
}
