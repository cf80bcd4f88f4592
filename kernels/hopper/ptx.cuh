// SPDX-License-Identifier: Apache-2.0
// The instructions of sm_90a that the Hopper path uses besides wgmma: barriers in shared memory, copies that arrive on
// them, the fence between ordinary and tensor-core accesses, register hand-over between warpgroups.
#pragma once

#include <stdint.h>

#include "basic_ptx.cuh"
#include "hopper/shape.cuh"

namespace tv::hopper {

__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// The barrier gets this thread's arrival once all its copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Waits for the end of the phase of the given parity; the phase before the first has parity 1 and has ended.
__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void store_shared16(uint32_t dst, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Four fp8 to two pairs of fp16: exact, NaN and infinity included.
__device__ __forceinline__ void halves_of(E4M3, uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}
__device__ __forceinline__ void halves_of(E5M2, uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e5m2x2 %0, a;\ncvt.rn.f16x2.e5m2x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// Between ordinary writes to shared memory (this thread's, or ones a barrier has shown it) and wgmma reading them.
__device__ __forceinline__ void fence_async_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers among `kThreads` threads, by number (0 is __syncthreads).
template <int kThreads>
__device__ __forceinline__ void sync_threads(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// The same with an answer: whether any thread says yes.
template <int kThreads>
__device__ __forceinline__ bool sync_threads_or(int id, bool mine) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.b32 in, %1, 0;\n"
      "bar.red.or.pred out, %2, %3, in;\n"
      "selp.b32 %0, 1, 0, out;\n"
      "}"
      : "=r"(any)
      : "r"(int(mine)), "r"(id), "n"(kThreads)
      : "memory");
  return __any_sync(0xffffffffu, any);  // tells the compiler that warps do not diverge on it
}

template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8x8 matrices transposed: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t addr, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t addr, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

// Loads four 8x8 matrices transposed, addressed alike.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&v)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(addr)
               : "memory");
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

// Loads four 8x8 matrices, addressed alike.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&v)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(addr)
               : "memory");
}

}  // namespace tv::hopper
