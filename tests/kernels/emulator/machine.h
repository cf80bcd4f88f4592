// SPDX-License-Identifier: Apache-2.0
// One block of a GPU, emulated on the CPU, to run the portable verify kernel where there is no GPU.
//
// Real: all the code of kernels/portable but its ptx.cuh, and kernels/{index.h,device.cuh}, compiled by g++ as they
// are. Emulated, and only as far as those headers need it: the PTX instructions (basic_ptx.cuh, portable/ptx.cuh here
// take the place of the kernel's), warp intrinsics and __syncthreads (cuda_cpp.h), shared memory, and the block's 256
// threads. Threads are fibers that give way where they wait; warps take turns in a random order, and copies by cp.async
// arrive late, in the order of each thread, in a random one among threads. Shared memory starts as NaN.
//
// So this finds wrong indices, a missing wait, a barrier with the wrong count, a mask misread. It proves nothing about
// hardware: no memory model, no bank conflicts, no registers, no approximate arithmetic, nothing that nvcc does.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>

namespace tv::portable {
inline constexpr int kSharedBytes = 227 * 1024;
alignas(1024) inline uint8_t smem[kSharedBytes];  // what the kernel's `extern __shared__` finds
}  // namespace tv::portable

namespace emulator {

#ifndef TV_EMULATOR_THREADS
#define TV_EMULATOR_THREADS 256
#endif
constexpr int kThreads = TV_EMULATOR_THREADS, kWarps = kThreads / 32;

// What a thread has in flight: a copy, or an arrival after the copies before it, or the end of a group of them.
struct Copy {
  uint32_t dst;  // shared memory, or the barrier
  const void* src;
  int bytes;  // 0: an arrival; -1: the end of a group
  bool valid;
};

struct Fiber {
  void* stack_pointer;
  std::unique_ptr<char[]> stack;
  unsigned thread;
  bool done;
  std::deque<Copy> copies;
};

// A warp-wide instruction, which all lanes must reach.
struct Warp {
  const char* what;
  int arrived, turn;
  void* lane[32];
};

struct Barrier {
  int arrived, expected, turn;
};

struct MBarrier {
  uint32_t addr;
  int count, pending, completed;
};

struct Block {
  unsigned x, y, grid_x, grid_y;
  Fiber fibers[kThreads];
  Fiber* running = nullptr;
  void* scheduler = nullptr;
  Warp warps[kWarps];
  Barrier barriers[16];
  MBarrier mbarriers[32];
  int mbarrier_count;
  bool progress;    // somebody's wait may be over
  char error[160];  // the first failure, else empty
  uint64_t random;
  const uint8_t* pool;  // all of the KV that may be read
  int64_t pool_bytes;
  bool waits_hold;  // false: mbarrier waits return at once, a fault that the test must notice
};
inline Block block;

inline uint32_t draw(uint32_t below) {
  uint64_t z = block.random += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return uint32_t((z ^ z >> 31) >> 32) % below;
}

// Leaves the stack in use, as *from, for the one that `to` leads to (System V ABI of x86-64).
extern "C" void tv_emulator_switch(void** from, void* to);
asm(R"(
.text
.globl tv_emulator_switch
.hidden tv_emulator_switch
tv_emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

inline void give_way() { tv_emulator_switch(&block.running->stack_pointer, block.scheduler); }

// Notes the failure; a thread that fails never runs on.
inline void fail(const char* format, ...) {
  if (!block.error[0]) {
    va_list values;
    va_start(values, format);
    const int used =
        block.running ? snprintf(block.error, sizeof block.error, "thread %u: ", block.running->thread) : 0;
    vsnprintf(block.error + used, sizeof block.error - used, format, values);
    va_end(values);
  }
  while (block.running) give_way();
}

template <typename Condition>
void wait_until(Condition condition) {
  while (!condition()) give_way();
}

// All lanes of a warp meet here; the last one does the work, given what each of them brought.
template <typename Work>
void together(const char* what, void* mine, Work work) {
  Warp& warp = block.warps[block.running->thread / 32];
  if (warp.arrived == 0) warp.what = what;
  if (strcmp(warp.what, what)) fail("%s, while other lanes of the warp are at %s", what, warp.what);
  warp.lane[block.running->thread % 32] = mine;
  const int turn = warp.turn;
  if (++warp.arrived < 32) return wait_until([&] { return warp.turn != turn; });
  work(warp.lane);
  warp.arrived = 0, ++warp.turn, block.progress = true;
}

inline void block_barrier(int id, int expected) {
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) barrier.expected = expected;
  if (barrier.expected != expected) fail("barrier %d of %d threads and of %d", id, expected, barrier.expected);
  const int turn = barrier.turn;
  if (++barrier.arrived < expected) return wait_until([&] { return barrier.turn != turn; });
  barrier.arrived = 0, ++barrier.turn, block.progress = true;
}

// Addresses of shared memory start above 0, so that 0 is none.
constexpr uint32_t kSharedBase = 1024;

inline uint8_t* shared(uint32_t addr, int bytes) {
  const uint32_t at = addr - kSharedBase;
  if (addr % bytes) fail("shared address %u is not a multiple of %d", at, bytes);
  if (at > uint32_t(tv::portable::kSharedBytes - bytes)) fail("shared address %u is out of range", at);
  return tv::portable::smem + at;
}

inline MBarrier& mbarrier(uint32_t addr) {
  for (int i = 0; i < block.mbarrier_count; ++i) {
    if (block.mbarriers[i].addr == addr) return block.mbarriers[i];
  }
  fail("no mbarrier was initialised at %u", addr - kSharedBase);
  return block.mbarriers[0];
}

inline void arrive(MBarrier& barrier) {
  if (--barrier.pending == 0) barrier.pending = barrier.count, ++barrier.completed;
  block.progress = true;
}

inline void start_copy(Copy copy) {
  if (copy.bytes > 0) {
    if (uintptr_t(copy.src) % copy.bytes) fail("a copy of %d bytes from a misaligned address", copy.bytes);
    shared(copy.dst, copy.bytes);
  }
  block.running->copies.push_back(copy);
}

// Ends the oldest copy of a thread; false where it has none.
inline bool finish_copy(Fiber& fiber) {
  if (fiber.copies.empty()) return false;
  const Copy copy = fiber.copies.front();
  fiber.copies.pop_front();
  if (copy.bytes == 0) {
    arrive(mbarrier(copy.dst));
  } else if (copy.bytes < 0) {
    // groups are counted where they are waited for
  } else if (copy.valid) {
    memcpy(shared(copy.dst, copy.bytes), copy.src, copy.bytes);
  } else {
    memset(shared(copy.dst, copy.bytes), 0, copy.bytes);
  }
  return block.progress = true;
}

}  // namespace emulator
