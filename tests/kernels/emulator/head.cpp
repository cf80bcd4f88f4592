// SPDX-License-Identifier: Apache-2.0
// The drafting head's kernels on the emulated block (machine.h): all of kernels/head but its entry points, as it is.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_cpp.h"
#include "schedule.h"

inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int atomicAdd(int* at, int more) {
  const int before = *at;
  *at += more;
  return before;
}
inline int __reduce_add_sync(unsigned, int mine) {
  return reduce("redux.add", mine, [](unsigned a, unsigned b) { return a + b; });
}
inline int __syncthreads_count(bool mine) {
  static int count;
  __syncthreads();
  count = 0;
  __syncthreads();
  count += mine;
  __syncthreads();
  return count;
}

#include "head/lists.cuh"
#include "head/merge.cuh"

namespace {

constexpr int kThreads = emulator::kThreads;
static_assert(tv::head::kListThreads == kThreads);
tv::head::Exchange<kThreads> exchange;
const TvTopkListsParams* lists;
const TvTopkMergeParams* merge;

template <typename T>
void list_thread() {
  tv::head::make_list<T>(*lists, exchange);
  emulator::finish_thread();
}

void merge_thread() {
  tv::head::merge_row(*merge, exchange);
  emulator::finish_thread();
}

// Null, or what went wrong.
const char* launch(void (*body)(), unsigned columns, unsigned rows, uint64_t seed) {
  auto& block = emulator::block;
  block.error[0] = 0, block.running = nullptr, block.random = seed;
  block.grid_x = columns, block.grid_y = rows;
  for (block.y = 0; block.y < rows; ++block.y) {
    for (block.x = 0; block.x < columns; ++block.x) {
      memset(&exchange, 0xa5, sizeof exchange);
      emulator::run_block(body);
      if (block.error[0]) return block.error;
    }
  }
  return nullptr;
}

}  // namespace

extern "C" const char* tv_emulate_lists(const TvTopkListsParams* p, uint64_t seed) {
  void (*const bodies[])() = {list_thread<__nv_bfloat16>, list_thread<__half>, list_thread<float>};
  lists = p;
  return launch(bodies[p->dtype], p->count, p->rows, seed);
}

// A block has half of the threads that it has on a GPU: room for half of the candidates.
extern "C" const char* tv_emulate_merge(const TvTopkMergeParams* p, uint64_t seed) {
  merge = p;
  return launch(merge_thread, p->rows, 1, seed);
}
