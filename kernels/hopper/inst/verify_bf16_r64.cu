// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90a
#include "hopper/verify.cuh"

TV_HOPPER_KERNEL(tv_hopper_bf16_r64, __nv_bfloat16, 64)
