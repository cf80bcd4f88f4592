// SPDX-License-Identifier: Apache-2.0
// A debug build's checks on the emulated block (machine.h): all of kernels/check.cuh, as it is.
#include "cuda_cpp.h"
#include "schedule.h"

// What it prints is the first failure; what stops a GPU ends nothing here.
#define printf(...) \
  (emulator::block.error[0] ? 0 : snprintf(emulator::block.error, sizeof emulator::block.error, __VA_ARGS__))
#undef __trap
#define __trap() (void)0
#include "check.cuh"
#undef printf

namespace {

const void* params;

template <typename Params>
void thread() {
  if constexpr (sizeof(Params) == sizeof(TvVerifyParams)) {
    tv::check_verify(*static_cast<const TvVerifyParams*>(params));
  } else {
    tv::check_prep(*static_cast<const TvPrepParams*>(params));
  }
  emulator::finish_thread();
}

const char* run(const void* p, int blocks, void (*body)()) {
  static_assert(tv::kCheckThreads == emulator::kThreads && sizeof(TvVerifyParams) != sizeof(TvPrepParams));
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = 0;
  params = p, block.grid_x = blocks, block.grid_y = 1, block.y = 0;
  for (block.x = 0; block.x < block.grid_x; ++block.x) {
    emulator::run_block(body);
    if (block.error[0]) return block.error;
  }
  return nullptr;
}

}  // namespace

// Null, or what a debug build says.
extern "C" const char* tv_emulate_check_verify(const TvVerifyParams* p) {
  return run(p, p->bs, thread<TvVerifyParams>);
}
extern "C" const char* tv_emulate_check_prep(const TvPrepParams* p) { return run(p, p->raw_bs, thread<TvPrepParams>); }
