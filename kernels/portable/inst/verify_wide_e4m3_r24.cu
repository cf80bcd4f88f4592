// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90 90a
#include "portable/verify.cuh"

TV_VERIFY_KERNEL(tv_verify_wide_e4m3_r24, __nv_bfloat16, Wide<24, tv::portable::E4M3>)
