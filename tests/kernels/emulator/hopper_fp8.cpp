// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel for pools of fp8 on an emulated block of 384 threads, block after block of a launch.
#define TV_EMULATOR_THREADS 384
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_cpp.h"
// The order matters: CUDA's qualifiers are gone from here on.
#include "hopper/fp8/verify.cuh"
#include "schedule.h"

// What `extern __shared__` in the kernel finds.
asm(".globl _ZN2tv6hopper6sharedE\n.set _ZN2tv6hopper6sharedE, _ZN2tv8portable4smemE");

namespace {

using namespace tv::hopper;

const TvVerifyParams* params;

template <typename F, int kRows>
void thread() {
  verify_block<__nv_bfloat16, fp8::Math<__nv_bfloat16, F, kRows>>(*params);
  emulator::finish_thread();
}

}  // namespace

// Null, or what went wrong. KV lies in `pool_bytes` from p->kv on.
extern "C" const char* tv_emulate_hopper_fp8(const TvVerifyParams* p, int rows, int64_t pool_bytes, uint64_t seed,
                                             bool waits_hold) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed, block.waits_hold = waits_hold;
  block.pool = static_cast<const uint8_t*>(p->kv), block.pool_bytes = pool_bytes;
  params = p;
  block.grid_x = tv::ceil_div(p->max_q * p->heads, rows), block.grid_y = p->splits + tv::writes_directly(*p);
  for (block.y = 0; block.y < block.grid_y; ++block.y) {
    for (block.x = 0; block.x < block.grid_x; ++block.x) {
      for (auto& warp : groups) warp.clear();
      const bool e5m2 = p->kv_dtype == TV_FP8_E5M2;
      emulator::run_block(rows == 48   ? thread<E4M3, 48>
                          : rows == 32 ? (e5m2 ? thread<E5M2, 32> : thread<E4M3, 32>)
                                       : (e5m2 ? thread<E5M2, 72> : thread<E4M3, 72>));
      if (block.error[0]) return block.error;
    }
  }
  return nullptr;
}

extern "C" int tv_active_splits(int kv_len, int count, int taper) { return tv::active_splits(kv_len, {count, taper}); }
