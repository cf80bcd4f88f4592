// SPDX-License-Identifier: Apache-2.0
// The entry to the emulator (machine.h): a launch of one instance of the portable verify kernel, block after block.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <set>

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
  int kv_dtype, rows;
  void (*thread)();
};

template <typename T, typename C>
constexpr Instance instance(const char* name, int kv_dtype) {
  static_assert(C::kSmemBytes <= tv::portable::kSharedBytes && tv::portable::kThreads == emulator::kThreads);
  return {name, kv_dtype, C::kRows, thread<T, C>};
}

using tv::portable::E4M3;
using tv::portable::E5M2;
using tv::portable::Narrow;
using tv::portable::Wide;
const Instance instances[] = {
    instance<__nv_bfloat16, Narrow<8>>("Narrow<8>", TV_BF16),
    instance<__nv_bfloat16, Narrow<40>>("Narrow<40>", TV_BF16),
    instance<__nv_bfloat16, Narrow<48>>("Narrow<48>", TV_BF16),
    instance<__nv_bfloat16, Wide<48>>("Wide<48>", TV_BF16),
    instance<__half, Narrow<40>>("Narrow<40>", TV_FP16),
    instance<__nv_bfloat16, Narrow<8, E4M3>>("Narrow<8>", TV_FP8_E4M3),
    instance<__nv_bfloat16, Narrow<40, E5M2>>("Narrow<40>", TV_FP8_E5M2),
    instance<__nv_bfloat16, Wide<32, E4M3>>("Wide<32>", TV_FP8_E4M3),
    instance<__nv_bfloat16, Wide<48, E4M3>>("Wide<48>", TV_FP8_E4M3),
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
    if (strcmp(one.name, name) || one.kv_dtype != p->kv_dtype) continue;
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

// A byte of the pool as fp16, each way that the kernel has: 0 and 1 as one of two neighbours, 2 and 3 as one of two
// columns, 4 by bits alone.
extern "C" int tv_widen(int kv_dtype, int byte, int way) {
  uint32_t low, high;
  const uint32_t word = way == 0   ? byte | byte << 8
                        : way == 1 ? byte << 16 | uint32_t(byte) << 24
                        : way == 2 ? byte | byte << 16
                                   : uint32_t(byte) << 8 | uint32_t(byte) << 24;
  if (way == 4) {
    low = high = tv::portable::widen_e4m3_by_bits(word);
  } else if (kv_dtype == TV_FP8_E4M3) {
    way < 2 ? E4M3::neighbours(word, low, high) : E4M3::columns(word, low, high);
  } else {
    way < 2 ? E5M2::neighbours(word, low, high) : E5M2::columns(word, low, high);
  }
  const uint32_t pair = way % 2 ? high : low;
  return (pair & 0xffff) == pair >> 16 ? int(pair & 0xffff) : -1;
}

// Places in shared memory where the threads of a block keep what registers have no room for, of Q of an fp8 pool: no
// barrier comes between writing and reading.
extern "C" int tv_places_of_queries() {
  using C = Wide<48, E4M3>;
  static_assert(C::kSharedQueryRegs > 0);
  std::set<const uint32_t*> places;
  for (int i = 0; i < tv::portable::kThreads; ++i) {
    const tv::portable::Scores<__nv_bfloat16, C> score(i / 32, i % 32);
    const uint32_t* const first = score.shared_queries(tv::portable::smem + C::kQueriesAt);
    for (int word = 0; word < C::kSharedQueryRegs; ++word) places.insert(first + word);
  }
  const auto end = reinterpret_cast<const uint32_t*>(tv::portable::smem + C::kSmemBytes);
  return *places.rbegin() < end ? int(places.size()) / C::kSharedQueryRegs : -1;
}

extern "C" int tv_active_splits(int kv_len, int count, int taper) { return tv::active_splits(kv_len, {count, taper}); }
