// SPDX-License-Identifier: Apache-2.0
// Runs the threads of an emulated block to their end, in an order that the seed decides.
#pragma once

#include "machine.h"

namespace emulator {

constexpr int kStackBytes = 128 << 10;

// Makes every fiber begin with `body`, which must end with finish_thread().
inline void reset(void (*body)()) {
  memset(tv::portable::smem, 0xff, sizeof tv::portable::smem);  // NaN
  block.mbarrier_count = 0;
  for (Warp& warp : block.warps) warp = {};
  for (Barrier& barrier : block.barriers) barrier = {};
  for (int i = 0; i < kThreads; ++i) {
    Fiber& fiber = block.fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    fiber.thread = i, fiber.done = false;
    fiber.copies.clear();
    // As if tv_emulator_switch had been called by nobody, right before `body`: 6 registers, then where to return to.
    void** top = reinterpret_cast<void**>(uintptr_t(fiber.stack.get() + kStackBytes) & ~uintptr_t(15));
    top[-2] = reinterpret_cast<void*>(body);
    fiber.stack_pointer = top - 8;
  }
}

inline void finish_thread() {
  block.running->done = block.progress = true;
  while (true) give_way();
}

// Lets every lane of a warp run until it waits; true where that may end somebody's wait.
inline bool run_warp(int warp) {
  block.progress = false;
  for (Fiber& fiber : block.fibers) {
    if (fiber.thread / 32 != unsigned(warp) || fiber.done || block.error[0]) continue;
    block.running = &fiber;
    tv_emulator_switch(&block.scheduler, fiber.stack_pointer);
    block.running = nullptr;
  }
  return block.progress;
}

// Ends up to `tries` copies of threads drawn; true where there were any.
inline bool finish_some_copies(int tries) {
  bool any = false;
  for (int i = 0; i < tries; ++i) any |= finish_copy(block.fibers[draw(kThreads)]);
  return any;
}

// Ends the oldest copy of every thread; false where none was in flight.
inline bool finish_a_copy_each() {
  bool any = false;
  for (Fiber& fiber : block.fibers) any |= finish_copy(fiber);
  return any;
}

inline bool all_done() {
  for (const Fiber& fiber : block.fibers) {
    if (!fiber.done) return false;
  }
  return true;
}

// Runs `body` in all threads; what goes wrong is in block.error.
inline void run_block(void (*body)()) {
  reset(body);
  const int favourite = draw(kWarps), bias = draw(3), copies_at_once = draw(2) ? 4 : 400;
  unsigned waiting = 0;  // warps, a bit each
  while (!block.error[0] && !all_done()) {
    if (waiting == (1u << kWarps) - 1) {
      if (!finish_a_copy_each()) return fail("deadlock: every warp waits, and no copy is in flight");
      waiting = 0;
    }
    const int warp = draw(3) < unsigned(bias) ? favourite : draw(kWarps);
    if (waiting >> warp & 1 && draw(8)) continue;
    for (int turns = 1 + draw(40); turns > 0; --turns) {
      if (!run_warp(warp)) {
        waiting |= 1u << warp;
        break;
      }
      waiting = 0;
    }
    if (finish_some_copies(1 + draw(copies_at_once))) waiting = 0;
  }
  if (block.error[0]) return;
  for (const Fiber& fiber : block.fibers) {
    for (const Copy& copy : fiber.copies) {
      if (copy.bytes >= 0) return fail("thread %u ended with copies in flight", fiber.thread);
    }
  }
  for (const Barrier& barrier : block.barriers) {
    if (barrier.arrived) return fail("the block ended with a barrier half full");
  }
}

}  // namespace emulator
