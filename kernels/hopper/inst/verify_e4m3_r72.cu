// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90a
#include "hopper/fp8/verify.cuh"

TV_HOPPER_KERNEL_OF(tv_hopper_e4m3_r72, __nv_bfloat16, tv::hopper::fp8::Math<__nv_bfloat16, tv::hopper::E4M3, 72>)
