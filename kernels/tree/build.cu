// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"
#include "tree/build.cuh"

extern "C" __global__ void __launch_bounds__(tv::tree::kThreads) tv_build_tree(const __grid_constant__ TvTreeParams p) {
  tv::tree::build_block(p);
}

extern const tv::Kernel tv_build_tree_info;
const tv::Kernel tv_build_tree_info = {"tv_build_tree", reinterpret_cast<const void*>(tv_build_tree), 0,
                                       tv::tree::kThreads};
