// SPDX-License-Identifier: Apache-2.0
// The C entry point of moving KV rows: blocks along y are the buffers, those along x share a buffer's tiles.
#include <cuda_runtime.h>

#include "kernel.h"
#include "kv/cut.h"
#include "kv/params.h"

extern const tv::Kernel tv_kv_move_info;

namespace {

constexpr int kMaxBuffers = 65535;

bool is_launchable(const TvKvMoveParams& p) {
  if (p.buffers < 1 || p.buffers > kMaxBuffers || p.group < 0 || p.group > tv::kv::kMaxGroup) return false;
  if (p.longest < tv::kv::kPieceBytes || p.longest % tv::kv::kPieceBytes || p.capacity < 0) return false;
  return (p.index_bytes == 4 || p.index_bytes == 8) &&
         int64_t(p.capacity) * (p.longest / tv::kv::kPieceBytes) < INT32_MAX;
}

}  // namespace

extern "C" int tv_kv_move(const TvKvMoveParams* p, void* stream) {
  if (!is_launchable(*p)) return cudaErrorInvalidValue;
  if (p->capacity == 0) return cudaSuccess;
  const tv::kv::Cut tile = tv::kv::cut(p->longest, p->group);
  const int tiles = tv::ceil_div(p->capacity, tile.rows) * tile.across;
  const int most = tv::ceil_div(tv::kv::kMaxBlocks, p->buffers);
  void* args[] = {const_cast<TvKvMoveParams*>(p)};
  return cudaLaunchKernel(tv_kv_move_info.function, dim3(tiles < most ? tiles : most, p->buffers),
                          dim3(tv::kv::kThreads), args, 0, static_cast<cudaStream_t>(stream));
}
