// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90a
#include "hopper/verify.cuh"

TV_HOPPER_KERNEL(tv_hopper_fp16_r64, __half, 64)
