// SPDX-License-Identifier: Apache-2.0
// wgmma of one 64 x N x 16 step of fp16 with `a` in registers, fp32 sums in registers.
#pragma once

#include "hopper/wgmma.cuh"

namespace tv::hopper::fp8 {

// d = a * b^T, or d += a * b^T.
template <int kN>
struct WgmmaFragment;

#define TV_WGMMA_FRAGMENT(N, D, REGS, A0, A1, A2, A3, B, MORE)                                                        \
  template <>                                                                                                         \
  struct WgmmaFragment<N> {                                                                                           \
    __device__ __forceinline__ static void run(float (&d)[N / 8][4], const uint32_t* a, uint64_t b, bool more) {      \
      asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, %" MORE                                                    \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGS "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 \
                   "}, %" B ", more, 1, 1, 0;\n}"                                                                     \
                   : D                                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(more)));                             \
    }                                                                                                                 \
  };
TV_WGMMA_FRAGMENT(32, TV_D_32, TV_REGS_16, "16", "17", "18", "19", "20", "21")
TV_WGMMA_FRAGMENT(48, TV_D_48, TV_REGS_24, "24", "25", "26", "27", "28", "29")
TV_WGMMA_FRAGMENT(72, TV_D_72, TV_REGS_36, "36", "37", "38", "39", "40", "41")
#undef TV_WGMMA_FRAGMENT

}  // namespace tv::hopper::fp8
