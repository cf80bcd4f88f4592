// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90a
#include "hopper/m64/verify.cuh"

TV_HOPPER_KERNEL_OF(tv_hopper_fp8_m64, __nv_bfloat16, tv::hopper::m64::Math<__nv_bfloat16, tv::hopper::Fp8>)
