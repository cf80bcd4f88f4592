// SPDX-License-Identifier: Apache-2.0
// wgmma of one 64 x N x 16 step, both operands in shared memory, fp32 sums in registers.
//
// Operands are tiles of 128-byte rows under the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8),
// and 8 rows make a block of 1024 bytes. Sums: thread (warp w, lane l) of the warpgroup holds rows 16 w + l / 4 and +
// 8, columns 8 j + 2 (l % 4) and + 1 as d[j][0], d[j][1] and d[j][2], d[j][3].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace tv::hopper {

// Descriptor of a tile whose blocks of 8 rows follow each other. One wgmma reads 16 rows of a tile with the reduction
// down its rows, and a 32-byte column of one with the reduction along its rows, so one form serves both.
__device__ __forceinline__ uint64_t descriptor(uint32_t addr) {
  constexpr uint64_t kBlock = 1024 >> 4, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kBlock << 32 | kBlock << 16 | addr >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d = a * b, or d += a * b; kDown: the reduction runs down the rows of a's tile, not along them.
template <typename T, int kN, bool kDown>
struct Wgmma;

#define TV_REGS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TV_REGS_16 TV_REGS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TV_REGS_24 TV_REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TV_REGS_32 TV_REGS_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TV_REGS_36 TV_REGS_32 ",%32,%33,%34,%35"
#define TV_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define TV_D_16 TV_D(0), TV_D(1)
#define TV_D_32 TV_D_16, TV_D(2), TV_D(3)
#define TV_D_48 TV_D_32, TV_D(4), TV_D(5)
#define TV_D_64 TV_D_48, TV_D(6), TV_D(7)
#define TV_D_72 TV_D_64, TV_D(8)

#define TV_WGMMA(TYPE, PTX_TYPE, N, REGS, A, B, MORE, DOWN)                                               \
  template <bool kDown>                                                                                   \
  struct Wgmma<TYPE, N, kDown> {                                                                          \
    __device__ __forceinline__ static void run(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool more) { \
      asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, %" MORE                                        \
                   ", 0;\n"                                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_TYPE "." PTX_TYPE " {" REGS      \
                   "}, "                                                                                  \
                   "%" A ", %" B ", more, 1, 1, %" DOWN ", 0;\n}"                                         \
                   : TV_D_##N                                                                             \
                   : "l"(a), "l"(b), "r"(int(more)), "n"(int(kDown)));                                    \
    }                                                                                                     \
  };
#define TV_WGMMA_OF(TYPE, PTX_TYPE)                                \
  TV_WGMMA(TYPE, PTX_TYPE, 16, TV_REGS_8, "8", "9", "10", "11")    \
  TV_WGMMA(TYPE, PTX_TYPE, 32, TV_REGS_16, "16", "17", "18", "19") \
  TV_WGMMA(TYPE, PTX_TYPE, 48, TV_REGS_24, "24", "25", "26", "27") \
  TV_WGMMA(TYPE, PTX_TYPE, 64, TV_REGS_32, "32", "33", "34", "35") \
  TV_WGMMA(TYPE, PTX_TYPE, 72, TV_REGS_36, "36", "37", "38", "39")
TV_WGMMA_OF(__nv_bfloat16, "bf16")
TV_WGMMA_OF(__half, "f16")
#undef TV_WGMMA_OF
#undef TV_WGMMA

// The same with the query rows on the M side. `a` in registers is laid out as sums are: a[0], a[2] are columns 0 .. 7,
// 8 .. 15 of row l / 4, a[1], a[3] those of the row 8 below, two columns a register.

// d [64 x 64] = a * b^T, or d += a * b^T, a in registers.
template <typename T>
struct WgmmaScores;

// Columns 8 kAt and up of d += a * b [64 x 128]: the reduction runs down the rows of b's two panels.
template <typename T>
struct WgmmaValues;

// Descriptor of panels side by side, `apart` bytes from one to the next, with the reduction down their rows.
__device__ __forceinline__ uint64_t descriptor_of_panels(uint32_t addr, int apart) {
  constexpr uint64_t kBlock = 1024 >> 4, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kBlock << 32 | uint64_t(apart >> 4) << 16 | addr >> 4;
}

#define TV_D_4(j) TV_D(j), TV_D(j + 1), TV_D(j + 2), TV_D(j + 3)
#define TV_D_16X(j) TV_D_4(j), TV_D_4(j + 4), TV_D_4(j + 8), TV_D_4(j + 12)
#define TV_REGS_64                                                                                       \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"   \
  "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define TV_WGMMA_M64_OF(TYPE, PTX_TYPE)                                                                           \
  template <>                                                                                                     \
  struct WgmmaScores<TYPE> {                                                                                      \
    __device__ __forceinline__ static void run(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool more) { \
      asm volatile(                                                                                               \
          "{\n.reg .pred more;\nsetp.ne.b32 more, %37, 0;\n"                                                      \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX_TYPE "." PTX_TYPE " {" TV_REGS_32                     \
          "}, {%32,%33,%34,%35}, %36, more, 1, 1, 0;\n}"                                                          \
          : TV_D_64                                                                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(more)));                                  \
    }                                                                                                             \
  };                                                                                                              \
  template <>                                                                                                     \
  struct WgmmaValues<TYPE> {                                                                                      \
    template <int kAt>                                                                                            \
    __device__ __forceinline__ static void run(float (&d)[32][4], uint64_t a, uint64_t b) {                       \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX_TYPE "." PTX_TYPE " {" TV_REGS_64           \
                   "}, %64, %65, 1, 1, 1, 0, 1;"                                                                  \
                   : TV_D_16X(kAt)                                                                                \
                   : "l"(a), "l"(b));                                                                             \
    }                                                                                                             \
    template <int kAt>                                                                                            \
    __device__ __forceinline__ static void run(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX_TYPE "." PTX_TYPE " {" TV_REGS_64           \
                   "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                       \
                   : TV_D_16X(kAt)                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                         \
    }                                                                                                             \
  };
TV_WGMMA_M64_OF(__nv_bfloat16, "bf16")
TV_WGMMA_M64_OF(__half, "f16")
#undef TV_WGMMA_M64_OF

}  // namespace tv::hopper
