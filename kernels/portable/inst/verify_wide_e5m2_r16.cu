// SPDX-License-Identifier: Apache-2.0
// tv-arches: 90 90a
#include "portable/verify.cuh"

TV_VERIFY_KERNEL(tv_verify_wide_e5m2_r16, __nv_bfloat16, Wide<16, tv::portable::E5M2>)
