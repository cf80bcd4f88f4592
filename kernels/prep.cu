// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"
#include "prep.cuh"

extern "C" __global__ void __launch_bounds__(tv::kPrepThreads) tv_prep(const __grid_constant__ TvPrepParams p) {
  tv::prep_block(p);
}

extern const tv::Kernel tv_prep_info;
const tv::Kernel tv_prep_info = {"tv_prep", reinterpret_cast<const void*>(tv_prep), 0, tv::kPrepThreads};
