// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup of the Hopper path on a pool of fp8, emulated (machine.h), with one warpgroup beside it that
// looks at the tiles as they land and gives their parts back.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_cpp.h"
// The order matters: CUDA's qualifiers are gone from here on.
#include "hopper/fp8_loader.cuh"
#include "hopper/m64/shape.cuh"
#include "schedule.h"

namespace {

using namespace tv::hopper;

const TvVerifyParams* params;
tv::Range range;
uint8_t* tiles;  // each as its panels, in order

// Copies a third of a tile, as soon as it has landed; each thread its share.
template <typename S>
void look(uint32_t smem, int t, int third, int i) {
  const int stage = t % kStages;
  barrier_wait(smem + S::kFull + 8 * (3 * stage + third), t / kStages & 1);
  for (int j = third * kThird; j < (third + 1) * kThird; ++j) {
    const uint32_t at = smem + (j == kRopePanel ? S::kRope + stage * S::kRopeStride
                                                : S::kValues + (stage * kRopePanel + j) * kPanelBytes);
    for (int byte = i * 16; byte < kPanelBytes; byte += kWarpgroup * 16) {
      memcpy(tiles + (t * kPanels + j) * kPanelBytes + byte, emulator::shared(at + byte, 16), 16);
    }
  }
}

template <typename S>
void thread() {
  const int i = int(threadIdx.x) % kWarpgroup;
  const uint32_t smem = tv::smem_address(tv::portable::smem);
  if (threadIdx.x == 0) {
    for (int k = 0; k < 3 * kStages; ++k) barrier_init(smem + S::kFull + 8 * k, kWarpgroup);
    for (int k = 0; k < S::kParts * kStages; ++k) barrier_init(smem + S::kFree + 8 * k, kWarpgroup / 32);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    const tv::Request req(*params, 0);
    using Loads = Loading<__nv_bfloat16, Fp8, S>;
    typename Loads::First first = {};
    first.fetch(*params, req, range.begin, range.end);
    Loads::run(*params, req, range, first, smem);
  } else {
    // In the order of the kernels: the parts of a tile come back when the next one has landed whole.
    const auto give_back = [&](int t) {
      sync_threads<kWarpgroup>(1);
      for (int part = 0; part < S::kParts && i % 32 == 0; ++part) {
        barrier_arrive(smem + S::kFree + 8 * (S::kParts * (t % kStages) + part));
      }
    };
    int t = 0;
    for (; range.begin + t * kTile < range.end; ++t) {
      for (int k = 0; k < 3; ++k) look<S>(smem, t, S::kOddLastFirst && t % 2 ? 2 - k : k, i);
      if (t > 0) give_back(t - 1);
    }
    give_back(t - 1);
  }
  emulator::finish_thread();
}

}  // namespace

// Null, or what went wrong. `out` gets the tiles of positions begin .. end of the only request.
extern "C" const char* tv_emulate_loader(const TvVerifyParams* p, int rows, int begin, int end, uint8_t* out,
                                         int64_t pool_bytes, uint64_t seed, bool waits_hold) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed, block.waits_hold = waits_hold;
  block.pool = static_cast<const uint8_t*>(p->kv), block.pool_bytes = pool_bytes;
  params = p, range = {begin, end}, tiles = out;
  emulator::run_block(rows == 32   ? thread<Fp8Shape<Shape<32>>>
                      : rows == 72 ? thread<Fp8Shape<Shape<72>>>
                                   : thread<Fp8Shape<m64::Shape>>);
  return block.error[0] ? block.error : nullptr;
}

extern "C" bool tv_loads_apart(int rows) {
  return rows == 32   ? Fp8Shape<Shape<32>>::kRawApart
         : rows == 72 ? Fp8Shape<Shape<72>>::kRawApart
                      : Fp8Shape<m64::Shape>::kRawApart;
}
