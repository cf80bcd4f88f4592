// SPDX-License-Identifier: Apache-2.0
// The entry to the emulator (machine.h) for kernels/kv: a launch's blocks, one after the other, in a random order.
#include <algorithm>
#include <vector>

#include "cuda_cpp.h"

#undef __shared__
#define __shared__ static  // what it finds there is the block's before it
#include "kv/move.cuh"
#include "schedule.h"

namespace {

static_assert(tv::kv::kThreads == emulator::kThreads);

const TvKvMoveParams* params;

void thread() {
  tv::kv::move_block(*params);
  emulator::finish_thread();
}

}  // namespace

// Null, or what went wrong. `blocks`: along x, any number serves.
extern "C" const char* tv_emulate_kv_move(const TvKvMoveParams* p, int blocks, uint64_t seed) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed, block.waits_hold = true;
  block.grid_x = blocks, block.grid_y = p->buffers;
  params = p;
  std::vector<int> order(blocks * p->buffers);
  for (int i = 0; i < int(order.size()); ++i) order[i] = i;
  for (int i = int(order.size()) - 1; i > 0; --i) std::swap(order[i], order[emulator::draw(i + 1)]);
  for (int at : order) {
    block.x = at % blocks, block.y = at / blocks;
    emulator::run_block(thread);
    if (block.error[0]) return block.error;
  }
  return nullptr;
}
