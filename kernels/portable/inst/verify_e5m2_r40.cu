// SPDX-License-Identifier: Apache-2.0
#include "portable/verify.cuh"

TV_VERIFY_KERNEL(tv_verify_e5m2_r40, __nv_bfloat16, Narrow<40, tv::portable::E5M2>)
