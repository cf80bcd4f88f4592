// SPDX-License-Identifier: Apache-2.0
// The C entry points: pick the kernel, size the grid, launch. Nothing here reads device memory.
#include <cuda_runtime.h>

#include <atomic>

#include "index.h"
#include "kernel.h"
#include "params.h"

#define TV_FOR_EACH_ROW_TILE(DO, TYPE) DO(TYPE, 8) DO(TYPE, 16) DO(TYPE, 24) DO(TYPE, 32) DO(TYPE, 40)
#define TV_DECLARE(TYPE, ROWS) extern const tv::Kernel tv_verify_##TYPE##_r##ROWS##_info;
#define TV_LIST(TYPE, ROWS) &tv_verify_##TYPE##_r##ROWS##_info,
TV_FOR_EACH_ROW_TILE(TV_DECLARE, bf16)
TV_FOR_EACH_ROW_TILE(TV_DECLARE, fp16)
extern const tv::Kernel tv_combine_bf16_info, tv_combine_fp16_info, tv_prep_info;

namespace {

constexpr int kRowTiles = tv::kMaxRowTile / 8;
constexpr int kMaxDevices = 64;

// Verify kernels last, by dtype and row tile.
const tv::Kernel* const kKernels[] = {&tv_combine_bf16_info, &tv_combine_fp16_info, &tv_prep_info,
                                      TV_FOR_EACH_ROW_TILE(TV_LIST, bf16) TV_FOR_EACH_ROW_TILE(TV_LIST, fp16)};
constexpr int kCombine = 0, kPrep = 2, kVerify = 3;
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);

// More than 48 KB of dynamic shared memory must be asked for, once a kernel and device.
cudaError_t allow_smem(int index) {
  static std::atomic<bool> allowed[kKernelCount][kMaxDevices];
  int device = 0;
  cudaError_t err = cudaGetDevice(&device);
  if (err != cudaSuccess || device >= kMaxDevices || allowed[index][device].load(std::memory_order_relaxed)) return err;
  err = cudaFuncSetAttribute(kKernels[index]->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kKernels[index]->dynamic_smem_bytes);
  if (err == cudaSuccess) allowed[index][device].store(true, std::memory_order_relaxed);
  return err;
}

// Programmatic dependent launch: only for code that was compiled with the wait inside (device.cuh).
bool has_early_launch(int index) {
  static std::atomic<int> compiled_for[kKernelCount];
  int version = compiled_for[index].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, kKernels[index]->function) != cudaSuccess) return false;
    version = attributes.ptxVersion;
    compiled_for[index].store(version, std::memory_order_relaxed);
  }
  return version >= 90;
}

// `early`: the kernel may start before the one ahead of it in the stream has finished, and waits for it itself.
template <typename Params>
cudaError_t launch(int index, dim3 grid, const Params* params, void* stream, bool early = false) {
  const tv::Kernel& k = *kKernels[index];
  if (k.dynamic_smem_bytes > 48 * 1024) {
    if (const cudaError_t err = allow_smem(index)) return err;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(k.threads);
  config.dynamicSmemBytes = k.dynamic_smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* args[] = {const_cast<Params*>(params)};
  return cudaLaunchKernelExC(&config, k.function, args);
}

}  // namespace

extern "C" int tv_mla_verify(const TvVerifyParams* p, void* stream) {
  if (p->tokens == 0) return cudaSuccess;
  if (p->bs < 0 || p->max_q < 1 || p->heads < 1 || p->nsplit < 1 || p->nsplit > tv::kMaxSplits || p->dtype < TV_BF16 ||
      p->dtype > TV_FP16) {
    return cudaErrorInvalidValue;
  }
  const int rows = p->max_q * p->heads, tile = tv::row_tile(rows);
  // A single split writes the output itself, and one more z answers for rows that no request covers.
  const dim3 grid(tv::ceil_div(rows, tile), p->nsplit, p->bs + (p->nsplit == 1));
  if (grid.z > 0) {
    const int index = kVerify + p->dtype * kRowTiles + tile / 8 - 1;
    if (const cudaError_t err = launch(index, grid, p, stream)) return err;
  }
  if (p->nsplit == 1) return cudaSuccess;
  return launch(kCombine + p->dtype, dim3(rows, p->bs + 1), p, stream, has_early_launch(kCombine + p->dtype));
}

extern "C" int tv_mla_prep(const TvPrepParams* p, void* stream) {
  if (p->bs < 1 || p->raw_bs < 0 || p->raw_bs > p->bs || p->n < 1) return cudaErrorInvalidValue;
  // Enough blocks to hide the latency of a long row, no more than a wave or two for a wide batch.
  const int wanted = tv::ceil_div(int(p->row_stride), 2048), most = tv::ceil_div(512, p->bs);
  return launch(kPrep, dim3(wanted < most ? wanted : most, p->bs), p, stream);
}

extern "C" int tv_kernel_info(int i, const char** name, int* dynamic_smem_bytes, int* threads) {
  if (i < 0 || i >= kKernelCount) return 1;
  *name = kKernels[i]->name;
  *dynamic_smem_bytes = kKernels[i]->dynamic_smem_bytes;
  *threads = kKernels[i]->threads;
  return 0;
}

extern "C" const char* tv_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
