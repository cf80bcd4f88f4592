// SPDX-License-Identifier: Apache-2.0
#include "portable/verify.cuh"

TV_VERIFY_KERNEL(tv_verify_fp16_r8, __half, Narrow<8>)
