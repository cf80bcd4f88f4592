// SPDX-License-Identifier: Apache-2.0
// tv-debug
// Launches the checks of a debug build; empty in any other.
#include "check.h"

#ifdef TV_DEBUG
#include <stdio.h>

#include "check.cuh"

extern "C" __global__ void __launch_bounds__(tv::kCheckThreads)
    tv_check_verify(const __grid_constant__ TvVerifyParams p) {
  tv::check_verify(p);
}

extern "C" __global__ void __launch_bounds__(tv::kCheckThreads) tv_check_prep(const __grid_constant__ TvPrepParams p) {
  tv::check_prep(p);
}

cudaError_t tv::check(const TvVerifyParams& p, void* stream) {
  if (p.bs > 0) tv_check_verify<<<p.bs, kCheckThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

cudaError_t tv::check(const TvPrepParams& p, void* stream) {
  if (p.raw_bs > 0) tv_check_prep<<<p.raw_bs, kCheckThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}
#endif
