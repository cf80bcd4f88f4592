// SPDX-License-Identifier: Apache-2.0
#include "portable/verify.cuh"

TV_VERIFY_KERNEL(tv_verify_fp16_r16, __half, Narrow<16>)
