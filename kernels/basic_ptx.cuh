// SPDX-License-Identifier: Apache-2.0
// The PTX that all verify kernels use.
#pragma once

#include <stdint.h>

namespace tv {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, past L1; zeros where `valid` is false (nothing is read then).
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for rows that are no multiple of 128 bytes: L2 fetches 64 at once, so nothing of the rows beside them.
__device__ __forceinline__ void cp_async16_narrow(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The value that lane 0 has. Tells the compiler that it is the same in all lanes, which spares the code for the case
// that it isn't.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace tv
