// SPDX-License-Identifier: Apache-2.0
// The C entry points of the drafting head. How many blocks share a row depends on the vocabulary only, so the rows of a
// batch give the same bits whatever their number.
#include <cuda_runtime.h>

#include "head/keys.h"
#include "head/params.h"
#include "kernel.h"

extern const tv::Kernel tv_head_lists_bf16_info, tv_head_lists_fp16_info, tv_head_lists_fp32_info, tv_head_merge_info;

namespace {

template <typename Params>
int launch(const tv::Kernel& k, dim3 grid, const Params* params, void* stream) {
  void* args[] = {const_cast<Params*>(params)};
  return cudaLaunchKernel(k.function, grid, dim3(k.threads), args, 0, static_cast<cudaStream_t>(stream));
}

}  // namespace

extern "C" int tv_topk_lists(const TvTopkListsParams* p, void* stream) {
  const tv::Kernel* const kernels[] = {&tv_head_lists_bf16_info, &tv_head_lists_fp16_info, &tv_head_lists_fp32_info};
  if (p->rows == 0) return cudaSuccess;
  if (p->rows < 0 || p->rows > 65535 || p->vocab < 1 || p->k < 1 || p->k > tv::head::kMaxTopK) {
    return cudaErrorInvalidValue;
  }
  if (p->dtype < TV_LOGITS_BF16 || p->dtype > TV_LOGITS_FP32) return cudaErrorInvalidValue;
  if (p->count < tv::ceil_div(p->vocab, tv::head::kSlice)) return cudaErrorInvalidValue;
  return launch(*kernels[p->dtype], dim3(p->count, p->rows), p, stream);
}

extern "C" int tv_topk_merge(const TvTopkMergeParams* p, void* stream) {
  if (p->rows == 0) return cudaSuccess;
  if (p->rows < 0 || p->ranks < 1 || p->count < 1 || p->k < 1 || p->k > tv::head::kMaxTopK) {
    return cudaErrorInvalidValue;
  }
  if (int64_t(p->ranks) * p->count * p->k > tv::head::kMaxMerged) return cudaErrorInvalidValue;
  return launch(tv_head_merge_info, dim3(p->rows), p, stream);
}
