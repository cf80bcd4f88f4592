// SPDX-License-Identifier: Apache-2.0
// Takes the place of kernels/basic_ptx.cuh.
#pragma once

#include "cuda_cpp.h"

namespace tv {

inline uint32_t smem_address(const void* p) {
  return uint32_t(static_cast<const uint8_t*>(p) - portable::smem) + emulator::kSharedBase;
}

inline void cp_async16(uint32_t dst, const void* src, bool valid) {
  const int64_t at = static_cast<const uint8_t*>(src) - emulator::block.pool;
  if (valid && (at < 0 || at + 16 > emulator::block.pool_bytes)) emulator::fail("a copy from outside of the pool");
  emulator::start_copy({dst, src, 16, valid});
}

inline void cp_async16_narrow(uint32_t dst, const void* src, bool valid) { cp_async16(dst, src, valid); }

inline void cp_async_wait_all() {
  emulator::wait_until([] { return emulator::block.running->copies.empty(); });
}

inline float exp2_approx(float x) { return exp2f(x); }

inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace tv
