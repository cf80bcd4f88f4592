// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90a
#include "hopper/verify.cuh"

TV_HOPPER_KERNEL(tv_hopper_fp8_r32, __nv_bfloat16, 32, tv::hopper::Fp8)
