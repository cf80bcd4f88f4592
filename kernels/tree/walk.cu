// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"
#include "tree/walk.cuh"

extern "C" __global__ void __launch_bounds__(tv::tree::kThreads) tv_walk_tree(const __grid_constant__ TvWalkParams p) {
  tv::tree::walk_block(p);
}

extern const tv::Kernel tv_walk_tree_info;
const tv::Kernel tv_walk_tree_info = {"tv_walk_tree", reinterpret_cast<const void*>(tv_walk_tree), 0,
                                      tv::tree::kThreads};
