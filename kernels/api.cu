// SPDX-License-Identifier: Apache-2.0
// tv-debug
// The C entry points: pick the kernel, size the grid, launch. Nothing here reads device memory.
#include <cuda_runtime.h>

#include <atomic>

#include "check.h"
#include "hopper/shape.cuh"
#include "index.h"
#include "kernel.h"
#include "params.h"
#include "portable/limits.h"

// Row tiles of the verify kernels of each design, ascending.
#define TV_PORTABLE(DO, NAME) DO(NAME, 8) DO(NAME, 16) DO(NAME, 24) DO(NAME, 32) DO(NAME, 40) DO(NAME, 48)
#define TV_HOPPER(DO, NAME) DO(NAME, 16) DO(NAME, 32) DO(NAME, 48) DO(NAME, 72)
#define TV_HOPPER_FP8(DO, NAME) DO(NAME, 32) DO(NAME, 48) DO(NAME, 72)

#define TV_DECLARE(NAME, ROWS) extern const tv::Kernel NAME##_r##ROWS##_info;
#define TV_ENTRY(NAME, ROWS) {&NAME##_r##ROWS##_info, ROWS},
#define TV_ONE(NAME, ROWS) +1
TV_PORTABLE(TV_DECLARE, tv_verify_bf16)
TV_PORTABLE(TV_DECLARE, tv_verify_fp16)
TV_PORTABLE(TV_DECLARE, tv_verify_wide_bf16)
TV_PORTABLE(TV_DECLARE, tv_verify_wide_fp16)
TV_PORTABLE(TV_DECLARE, tv_verify_e4m3)
TV_PORTABLE(TV_DECLARE, tv_verify_e5m2)
TV_PORTABLE(TV_DECLARE, tv_verify_wide_e4m3)
TV_PORTABLE(TV_DECLARE, tv_verify_wide_e5m2)
TV_HOPPER(TV_DECLARE, tv_hopper_bf16)
TV_HOPPER(TV_DECLARE, tv_hopper_fp16)
TV_HOPPER_FP8(TV_DECLARE, tv_hopper_e4m3)
TV_HOPPER_FP8(TV_DECLARE, tv_hopper_e5m2)
extern const tv::Kernel tv_hopper_bf16_m64_info, tv_hopper_fp16_m64_info;
extern const tv::Kernel tv_combine_bf16_info, tv_combine_fp16_info, tv_prep_info, tv_plan_info;
extern const tv::Kernel tv_build_tree_info, tv_walk_tree_info;
extern const tv::Kernel tv_head_lists_bf16_info, tv_head_lists_fp16_info, tv_head_lists_fp32_info, tv_head_merge_info;
extern const tv::Kernel tv_kv_move_info;

namespace {

struct Entry {
  const tv::Kernel* kernel;
  int row_tile;  // query rows a block of a verify kernel takes
};

// Verify kernels last: set by set, in it by dtype, then by row tile. Those of fp8 pools before the others on the
// portable path, behind them on Hopper's.
constexpr Entry kKernels[] = {
    {&tv_combine_bf16_info, 0},
    {&tv_combine_fp16_info, 0},
    {&tv_prep_info, 0},
    {&tv_plan_info, 0},
    {&tv_build_tree_info, 0},
    {&tv_walk_tree_info, 0},
    {&tv_head_lists_bf16_info, 0},
    {&tv_head_lists_fp16_info, 0},
    {&tv_head_lists_fp32_info, 0},
    {&tv_head_merge_info, 0},
    {&tv_kv_move_info, 0},
    TV_PORTABLE(TV_ENTRY, tv_verify_e4m3)       //
    TV_PORTABLE(TV_ENTRY, tv_verify_e5m2)       //
    TV_PORTABLE(TV_ENTRY, tv_verify_wide_e4m3)  //
    TV_PORTABLE(TV_ENTRY, tv_verify_wide_e5m2)  //
    TV_PORTABLE(TV_ENTRY, tv_verify_bf16)       //
    TV_PORTABLE(TV_ENTRY, tv_verify_fp16)       //
    TV_PORTABLE(TV_ENTRY, tv_verify_wide_bf16)  //
    TV_PORTABLE(TV_ENTRY, tv_verify_wide_fp16)  //
    TV_HOPPER(TV_ENTRY, tv_hopper_bf16)         //
    TV_HOPPER(TV_ENTRY, tv_hopper_fp16)         //
    {&tv_hopper_bf16_m64_info, tv::hopper::kManyRowTile},
    {&tv_hopper_fp16_m64_info, tv::hopper::kManyRowTile},
    TV_HOPPER_FP8(TV_ENTRY, tv_hopper_e4m3)  //
    TV_HOPPER_FP8(TV_ENTRY, tv_hopper_e5m2)  //
};
constexpr int kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);
constexpr int kCombine = 0, kPrep = 2, kPlan = 3;
constexpr int kDtypes = 2;   // of queries
constexpr int kAsQuery = 0;  // a pool whose dtype is that of the queries

// Verify kernels of one design for one kind of pool.
struct Set {
  TvPath path;
  int kv;            // an fp8 TvDtype, or kAsQuery
  int dtypes;        // of queries that it has kernels for, the first ones of TvDtype
  int first, count;  // in kKernels; `count` for each dtype
  bool aligned_q;    // reads q in pieces of 16 bytes
  int many;          // in kKernels, by dtype: those for requests of many rows; 0: none
  int few = 0;       // AUTO leaves requests of so many rows, and less, to a set further down

  int at(int dtype, int i) const { return first + dtype * count + i; }
  int max_row_tile() const { return kKernels[at(0, count - 1)].row_tile; }
  // Of the kernels for `dtype`, the one for requests of `rows` query rows.
  int pick(int dtype, int rows) const {
    if (many && tv::hopper::has_many_rows(rows)) return many + dtype;
    int index = at(dtype, 0);
    while (kKernels[index].row_tile < tv::row_tile(rows, max_row_tile())) ++index;
    return index;
  }
  bool answers(int wanted, int dtype, int kv_dtype) const {
    if (dtype >= dtypes || kv != (kv_dtype == dtype ? kAsQuery : kv_dtype)) return false;
    return wanted == TV_PATH_AUTO || wanted == path || (wanted == TV_PATH_PORTABLE && path == TV_PATH_NARROW);
  }
};

// In order of preference: the first that is wanted, and that the device and the arguments allow.
constexpr int kPortableTiles = TV_PORTABLE(TV_ONE, ), kHopperTiles = TV_HOPPER(TV_ONE, );
constexpr int kHopperFp8Tiles = TV_HOPPER_FP8(TV_ONE, );
constexpr int kHopperE5M2 = kKernelCount - kHopperFp8Tiles, kHopperE4M3 = kHopperE5M2 - kHopperFp8Tiles;
constexpr int kVerify = kHopperE4M3 - kDtypes * (2 * kPortableTiles + kHopperTiles + 1);  // 1: for many rows
constexpr int kNarrow = kVerify, kWide = kNarrow + kDtypes * kPortableTiles, kHopper = kWide + kDtypes * kPortableTiles;
constexpr int kNarrowE4M3 = kVerify - 4 * kPortableTiles, kNarrowE5M2 = kNarrowE4M3 + kPortableTiles;
constexpr int kWideE4M3 = kNarrowE5M2 + kPortableTiles, kWideE5M2 = kWideE4M3 + kPortableTiles;
constexpr Set kSets[] = {
    {TV_PATH_HOPPER, kAsQuery, kDtypes, kHopper, kHopperTiles, true, kHopper + kDtypes* kHopperTiles},
    {TV_PATH_HOPPER, TV_FP8_E4M3, 1, kHopperE4M3, kHopperFp8Tiles, true, 0, TV_FEW_ROWS},
    {TV_PATH_HOPPER, TV_FP8_E5M2, 1, kHopperE5M2, kHopperFp8Tiles, true, 0, TV_FEW_ROWS},
    {TV_PATH_PORTABLE, kAsQuery, kDtypes, kWide, kPortableTiles, false, 0},
    {TV_PATH_NARROW, kAsQuery, kDtypes, kNarrow, kPortableTiles, false, 0},
    {TV_PATH_PORTABLE, TV_FP8_E4M3, 1, kWideE4M3, kPortableTiles, false, 0},
    {TV_PATH_NARROW, TV_FP8_E4M3, 1, kNarrowE4M3, kPortableTiles, false, 0},
    {TV_PATH_PORTABLE, TV_FP8_E5M2, 1, kWideE5M2, kPortableTiles, false, 0},
    {TV_PATH_NARROW, TV_FP8_E5M2, 1, kNarrowE5M2, kPortableTiles, false, 0},
};
constexpr int kSetCount = sizeof(kSets) / sizeof(kSets[0]);
static_assert(kKernels[kWide - 1].row_tile == tv::portable::kMaxRowTile);
static_assert(kKernels[kNarrowE4M3].row_tile == 8 && kKernels[kNarrowE4M3 - 1].row_tile == 0);
static_assert(kKernels[kHopperE4M3 - kDtypes - 1].row_tile == tv::hopper::kMaxRowTile);
static_assert(kKernels[kHopperE4M3 - 1].row_tile == tv::hopper::kManyRowTile);
static_assert(kKernels[kHopperE5M2 - 1].row_tile == tv::hopper::kMaxRowTile);
static_assert(kKernels[kKernelCount - 1].row_tile == tv::hopper::kMaxRowTile);

constexpr int kMaxRequestRows = 1 << 20;  // query rows of a request: exact in a float
constexpr int kCombineBlocks = 640;       // fit an H200 at once, nearly five a multiprocessor
constexpr int kMaxDevices = 64;
constexpr int kMaxGridY = 65535;
constexpr int64_t kMaxPartials = 1 << 25;  // rows of the workspace: combine counts their pieces of four in 32 bits
constexpr int kMaxPlannedSplits = 1024;

// No machine code for the device in the library, or more shared memory than a block gets there.
bool is_unsuited(cudaError_t err) {
  return err == cudaErrorNoKernelImageForDevice || err == cudaErrorInvalidDeviceFunction ||
         err == cudaErrorInvalidValue;
}

// Asks for the shared memory of a set's kernels, which also loads their code: once a device.
cudaError_t prepare(const Set& set, int device) {
  static std::atomic<int> known[kSetCount][kMaxDevices];  // 0: nothing yet, else 1 + cudaError_t
  std::atomic<int>* state = device < kMaxDevices ? &known[&set - kSets][device] : nullptr;
  if (state != nullptr) {
    if (const int code = state->load(std::memory_order_relaxed)) return static_cast<cudaError_t>(code - 1);
  }
  cudaError_t err = cudaSuccess;
  const int end = set.first + set.dtypes * set.count + (set.many ? set.dtypes : 0);
  for (int i = set.first; i < end && err == cudaSuccess; ++i) {
    const tv::Kernel& k = *kKernels[i].kernel;
    err = k.function == nullptr
              ? cudaErrorNoKernelImageForDevice
              : cudaFuncSetAttribute(k.function, cudaFuncAttributeMaxDynamicSharedMemorySize, k.dynamic_smem_bytes);
  }
  if (err != cudaSuccess) cudaGetLastError();  // told by the return value; whoever asks next shall not find it
  if (state != nullptr && (err == cudaSuccess || is_unsuited(err))) state->store(1 + err, std::memory_order_relaxed);
  return err;
}

bool is_pair(int dtype, int kv_dtype) {
  const bool queries = dtype == TV_BF16 || dtype == TV_FP16, fp8 = kv_dtype == TV_FP8_E4M3 || kv_dtype == TV_FP8_E5M2;
  return queries && (kv_dtype == dtype || (fp8 && dtype == TV_BF16));
}

// The set that serves `wanted` on the current device, for these queries, this pool and requests of so many query rows.
cudaError_t choose(int wanted, bool q_is_aligned, int dtype, int kv_dtype, int rows, const Set** chosen) {
  if (wanted < TV_PATH_AUTO || wanted > TV_PATH_NARROW || !is_pair(dtype, kv_dtype)) return cudaErrorInvalidValue;
  int device = 0;
  if (const cudaError_t err = cudaGetDevice(&device)) return err;
  for (const Set& set : kSets) {
    if (!set.answers(wanted, dtype, kv_dtype)) continue;
    if (wanted == TV_PATH_AUTO && rows <= set.few) continue;
    if (set.aligned_q && !q_is_aligned) {
      if (wanted == set.path) return cudaErrorInvalidValue;
      continue;
    }
    const cudaError_t err = prepare(set, device);
    if (err == cudaSuccess) *chosen = &set;
    if (err == cudaSuccess || !is_unsuited(err)) return err;
  }
  return cudaErrorNoKernelImageForDevice;
}

bool is_q_aligned(const TvVerifyParams& p) {
  const auto address = reinterpret_cast<uintptr_t>(p.q_nope) | reinterpret_cast<uintptr_t>(p.q_pe);
  return address % 16 == 0 && (p.q_nope_stride_t | p.q_nope_stride_h | p.q_pe_stride_t | p.q_pe_stride_h) % 8 == 0;
}

// Programmatic dependent launch: only for code that was compiled with the wait inside (device.cuh).
bool has_early_launch(int index) {
  static std::atomic<int> compiled_for[kKernelCount][kMaxDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int version = compiled_for[index][device].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, kKernels[index].kernel->function) != cudaSuccess) {
      cudaGetLastError();  // nobody else's error
      return false;
    }
    version = attributes.ptxVersion;
    compiled_for[index][device].store(version, std::memory_order_relaxed);
  }
  return version >= 90;
}

// `early`: the kernel may start before the one ahead of it in the stream has finished, and waits for it itself.
template <typename Params>
cudaError_t launch(int index, dim3 grid, dim3 block, const Params* params, void* stream, bool early = false) {
  const tv::Kernel& k = *kKernels[index].kernel;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = k.dynamic_smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* args[] = {const_cast<Params*>(params)};
  return cudaLaunchKernelExC(&config, k.function, args);
}

bool is_launchable(const TvVerifyParams& p) {
  if (p.bs < 0 || p.max_q < 1 || p.heads < 1 || !is_pair(p.dtype, p.kv_dtype)) return false;
  if (p.kv_dtype == p.dtype && p.k_scale != 1) return false;
  if (p.splits < p.bs || p.splits >= kMaxGridY) return false;
  if (int64_t(p.max_q) * p.heads > kMaxRequestRows || int64_t(p.tokens) * p.heads > INT32_MAX) return false;
  for (const int64_t stride : {p.q_nope_stride_t, p.q_nope_stride_h, p.q_pe_stride_t, p.q_pe_stride_h, p.kv_stride,
                               p.out_stride_t, p.out_stride_h}) {
    if (stride < 0 || stride > INT32_MAX) return false;
  }
  if (p.splits > p.bs && reinterpret_cast<uintptr_t>(p.workspace) % 16) return false;
  if (p.splits > p.bs && int64_t(p.splits) * p.max_q * p.heads > kMaxPartials) return false;
  if (p.bs == 0) return p.splits == 0;
  if (p.split_indptr != nullptr) return p.taper == 0 && p.splits <= kMaxPlannedSplits;
  if (p.taper < 0 || p.taper > tv::kMaxTaper || p.taper >= p.splits / p.bs) return false;
  return p.splits % p.bs == 0 && p.splits / p.bs <= tv::kMaxSplits;
}

}  // namespace

extern "C" int tv_mla_path(int wanted, int dtype, int kv_dtype, int rows, int* path, int* max_row_tile,
                           int* many_rows) {
  const Set* set = nullptr;
  if (const cudaError_t err = choose(wanted, true, dtype, kv_dtype, rows, &set)) return err;
  *path = set->path == TV_PATH_NARROW && wanted != TV_PATH_NARROW ? TV_PATH_PORTABLE : set->path;
  *max_row_tile = set->max_row_tile();
  *many_rows = set->many != 0;
  return cudaSuccess;
}

extern "C" int tv_mla_verify(const TvVerifyParams* p, void* stream) {
  if (p->tokens == 0) return cudaSuccess;
  if (!is_launchable(*p)) return cudaErrorInvalidValue;
  const Set* set = nullptr;
  const int rows = p->max_q * p->heads;
  if (const cudaError_t err = choose(p->path, is_q_aligned(*p), p->dtype, p->kv_dtype, rows, &set)) return err;
  if (const cudaError_t err = tv::check(*p, stream)) return err;
  const int index = set->pick(p->dtype, rows);

  // One more block along y answers for rows that no request covers; else combine does.
  const bool direct = p->splits <= p->bs;
  const dim3 grid(tv::ceil_div(rows, kKernels[index].row_tile), p->splits + direct);
  if (const cudaError_t err = launch(index, grid, kKernels[index].kernel->threads, p, stream)) return err;
  if (direct) return cudaSuccess;

  // Blocks that merge: a wave of them, no more than there are pieces of rows.
  const int combine = kCombine + p->dtype, nsplit = p->splits / p->bs;
  const int most = tv::ceil_div(rows * tv::kCombinePieces, nsplit), wave = kCombineBlocks / p->splits;
  const int blocks = wave < 1 ? 1 : wave < most ? wave : most;
  return launch(combine, dim3(blocks, p->splits), kKernels[combine].kernel->threads, p, stream,
                has_early_launch(combine));
}

extern "C" int tv_mla_plan(const TvPlanParams* p, void* stream) {
  if (p->bs < 1 || p->splits < p->bs || p->splits > kMaxPlannedSplits) return cudaErrorInvalidValue;
  return launch(kPlan, 1, tv::ceil_div(p->bs, 32) * 32, p, stream);  // a thread a request
}

extern "C" int tv_mla_prep(const TvPrepParams* p, void* stream) {
  if (p->bs < 1 || p->raw_bs < 0 || p->raw_bs > p->bs || p->n < 0) return cudaErrorInvalidValue;
  const int64_t packed = int64_t(p->raw_bs) * p->n * tv::mask_words(p->n);
  if (p->mask_kind == TV_MASK_PACKED && p->mask_numel < packed) return cudaErrorInvalidValue;
  if (const cudaError_t err = tv::check(*p, stream)) return err;
  // Enough blocks to hide the latency of a long row, no more than a wave or two for a wide batch.
  const int wanted = tv::ceil_div(int(p->row_stride), 2048), most = tv::ceil_div(512, p->bs);
  return launch(kPrep, dim3(wanted < most ? wanted : most, p->bs), kKernels[kPrep].kernel->threads, p, stream);
}

extern "C" int tv_kernel_info(int i, const char** name, int* dynamic_smem_bytes, int* threads) {
  if (i < 0 || i >= kKernelCount) return 1;
  const tv::Kernel& k = *kKernels[i].kernel;
  *name = k.name;
  *dynamic_smem_bytes = k.dynamic_smem_bytes;
  *threads = k.threads;
  return 0;
}

extern "C" const char* tv_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
