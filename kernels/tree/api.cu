// SPDX-License-Identifier: Apache-2.0
// The C entry points of the tree: a block a request.
#include <cuda_runtime.h>

#include "kernel.h"
#include "tree/limits.h"
#include "tree/params.h"

extern const tv::Kernel tv_build_tree_info, tv_walk_tree_info;

namespace {

template <typename Params>
int launch(const tv::Kernel& k, const Params* params, void* stream) {
  void* args[] = {const_cast<Params*>(params)};
  return cudaLaunchKernel(k.function, dim3(params->bs), dim3(k.threads), args, 0, static_cast<cudaStream_t>(stream));
}

// Of a tree that the kernels hold.
bool is_shape(int bs, int n, int levels) {
  return bs >= 1 && n >= 1 && n <= tv::tree::kMaxNodes && levels >= 1 && levels <= tv::tree::kMaxLevels;
}

}  // namespace

extern "C" int tv_tree_build(const TvTreeParams* p, void* stream) {
  if (!is_shape(p->bs, p->n, p->levels) || p->ranks < 1 || p->ranks > tv::tree::kMaxRanks) return cudaErrorInvalidValue;
  return launch(tv_build_tree_info, p, stream);
}

extern "C" int tv_tree_walk(const TvWalkParams* p, void* stream) {
  if (!is_shape(p->bs, p->n, p->levels)) return cudaErrorInvalidValue;
  return launch(tv_walk_tree_info, p, stream);
}
