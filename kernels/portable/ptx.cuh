// SPDX-License-Identifier: Apache-2.0
// The few PTX instructions of the portable path: all of them exist on sm_80 and later.
//
// What touches memory is volatile and keeps its place among barriers. The products work on registers alone and are left
// free, so that the compiler can weave other arithmetic between them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "basic_ptx.cuh"

namespace tv::portable {

// Keeps the compiler from working out ahead of a loop, and holding in registers, what follows from x.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keeps x in a register: the compiler can't work it out anew where it is used.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ int load_shared(uint32_t addr) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t addr, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}

// 4 or 8 bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(kBytes) : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The warp arrives, with all that its lanes have done so far; it does not wait.
__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

// The thread arrives once all copies that it has started so far are complete; it does not wait for that.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of a phase; phases alternate between parity 0 and 1, and one that ended before the first has
// parity 1. Whole warps call it: all lanes see the same.
#if __CUDA_ARCH__ >= 900
#define TV_MBARRIER_TEST "mbarrier.try_wait"  // rests meanwhile
#else
#define TV_MBARRIER_TEST "mbarrier.test_wait"
#endif
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{.reg .pred done; again: " TV_MBARRIER_TEST
               ".parity.shared.b64 done, [%0], %1; @!done bra.uni again;}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
#undef TV_MBARRIER_TEST

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(addr)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(addr)
               : "memory");
}

// d += a * b for one 16x8x16 tile with fp32 sums, where `on`, the same for the whole warp. One predicated instruction:
// no branch breaks up the code around it.
#define TV_MMA(TYPE)                                                                                     \
  asm("{.reg .pred on; setp.ne.s32 on, %10, 0; @on mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};}"                                      \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(int(on)))

template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool on);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                           const uint32_t (&b)[2], bool on) {
  TV_MMA("bf16");
}

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                    bool on) {
  TV_MMA("f16");
}

#undef TV_MMA

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to T, the first in the lower half, and back.
template <typename T>
__device__ __forceinline__ uint32_t round2(float x, float y);
template <typename T>
__device__ __forceinline__ float2 widen2(uint32_t pair);

template <>
__device__ __forceinline__ uint32_t round2<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t round2<__half>(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ float2 widen2<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 widen2<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Digit i of kSelect, in hexadecimal from the right, says which byte of x is byte i of the result; 4 stands for 0.
template <uint32_t kSelect>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t x) {
  return __byte_perm(x, 0, kSelect);
}

// Two e4m3 as fp16: the lower ones of the word, or the upper ones. From sm_89 on.
template <bool kUpper>
__device__ __forceinline__ uint32_t convert_e4m3(uint32_t word) {
  uint32_t pair;
  if constexpr (kUpper) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(pair) : "r"(word));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(pair) : "r"(word));
  }
  return pair;
}

// A pair of bf16 with NaN for infinities.
__device__ __forceinline__ uint32_t finite_bf16(uint32_t x) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(y) : "r"(x), "r"(0));  // of infinity, 0 times it is NaN
  return y;
}

// The greater ones of two pairs of bf16; of a number and NaN, the number.
__device__ __forceinline__ uint32_t greater_bf16(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}

// Four floats, rounded to T, in one 8-byte store.
template <typename T>
__device__ __forceinline__ void store4(T* dst, float4 v) {
  *reinterpret_cast<uint2*>(dst) = {round2<T>(v.x, v.y), round2<T>(v.z, v.w)};
}

}  // namespace tv::portable
