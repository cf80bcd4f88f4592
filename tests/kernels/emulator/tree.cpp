// SPDX-License-Identifier: Apache-2.0
// The entry to the emulator (machine.h) for the kernels of kernels/tree, block after block.
#include "cuda_cpp.h"

#undef __shared__
#define __shared__ static  // what it finds there is the block's before it
#include "schedule.h"
#include "tree/build.cuh"
#include "tree/walk.cuh"

namespace {

static_assert(tv::tree::kThreads == emulator::kThreads);

const TvTreeParams* tree_params;
const TvWalkParams* walk_params;

void build() {
  tv::tree::build_block(*tree_params);
  emulator::finish_thread();
}

void walk() {
  tv::tree::walk_block(*walk_params);
  emulator::finish_thread();
}

const char* run(void (*thread)(), int bs, uint64_t seed) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed, block.waits_hold = true;
  block.grid_x = bs, block.grid_y = 1, block.y = 0;
  for (block.x = 0; block.x < block.grid_x && !block.error[0]; ++block.x) emulator::run_block(thread);
  return block.error[0] ? block.error : nullptr;
}

}  // namespace

// Null, or what went wrong.
extern "C" const char* tv_emulate_tree_build(const TvTreeParams* p, uint64_t seed) {
  tree_params = p;
  return run(build, p->bs, seed);
}

extern "C" const char* tv_emulate_tree_walk(const TvWalkParams* p, uint64_t seed) {
  walk_params = p;
  return run(walk, p->bs, seed);
}
