// SPDX-License-Identifier: Apache-2.0
// The entry to the emulator (machine.h): a launch of one instance of the portable verify kernel, block after block.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_cpp.h"
#include "portable/verify.cuh"
#include "schedule.h"

namespace {

const TvVerifyParams* params;

template <typename T, typename C>
void thread() {
  tv::portable::verify_block<T, C>(*params);
  emulator::finish_thread();
}

struct Instance {
  const char* name;
  int dtype, rows;
  void (*thread)();
};

template <typename T, typename C>
constexpr Instance instance(const char* name, int dtype) {
  static_assert(C::kSmemBytes <= tv::portable::kSharedBytes && tv::portable::kThreads == emulator::kThreads);
  return {name, dtype, C::kRows, thread<T, C>};
}

using tv::portable::Narrow;
using tv::portable::Wide;
const Instance instances[] = {
    instance<__nv_bfloat16, Narrow<8>>("Narrow<8>", TV_BF16),
    instance<__nv_bfloat16, Narrow<40>>("Narrow<40>", TV_BF16),
    instance<__nv_bfloat16, Narrow<48>>("Narrow<48>", TV_BF16),
    instance<__nv_bfloat16, Wide<48>>("Wide<48>", TV_BF16),
    instance<__half, Narrow<40>>("Narrow<40>", TV_FP16),
};

}  // namespace

// Null, or what went wrong. KV lies in `pool_bytes` from p->kv on.
extern "C" const char* tv_emulate(const TvVerifyParams* p, const char* name, int64_t pool_bytes, uint64_t seed,
                                  bool waits_hold) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed, block.waits_hold = waits_hold;
  block.pool = static_cast<const uint8_t*>(p->kv), block.pool_bytes = pool_bytes;
  params = p;
  for (const Instance& one : instances) {
    if (strcmp(one.name, name) || one.dtype != p->dtype) continue;
    block.grid_x = tv::ceil_div(p->max_q * p->heads, one.rows), block.grid_y = p->splits + tv::writes_directly(*p);
    for (block.y = 0; block.y < block.grid_y; ++block.y) {
      for (block.x = 0; block.x < block.grid_x; ++block.x) {
        emulator::run_block(one.thread);
        if (block.error[0]) return block.error;
      }
    }
    return nullptr;
  }
  return "the emulator has no such instance";
}

extern "C" int tv_active_splits(int kv_len, int count, int taper) { return tv::active_splits(kv_len, {count, taper}); }
