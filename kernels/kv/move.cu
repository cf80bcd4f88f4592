// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"
#include "kv/move.cuh"

extern "C" __global__ void __launch_bounds__(tv::kv::kThreads)
    tv_kv_move_rows(const __grid_constant__ TvKvMoveParams p) {
  tv::kv::move_block(p);
}

extern const tv::Kernel tv_kv_move_info;
const tv::Kernel tv_kv_move_info = {"tv_kv_move_rows", reinterpret_cast<const void*>(tv_kv_move_rows), 0,
                                    tv::kv::kThreads};
