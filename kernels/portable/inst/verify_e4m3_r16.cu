// SPDX-License-Identifier: Apache-2.0
#include "portable/verify.cuh"

TV_VERIFY_KERNEL(tv_verify_e4m3_r16, __nv_bfloat16, Narrow<16, tv::portable::E4M3>)
