// SPDX-License-Identifier: Apache-2.0
// What CUDA C++ adds to C++, as far as the kernels' headers use it. CUDA's own headers, where needed, come before it.
#pragma once

#include <cmath>

#include "machine.h"

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__ inline

struct Dim {
  unsigned x, y;
};
#define threadIdx (Dim{emulator::block.running->thread, 0})
#define blockIdx (Dim{emulator::block.x, emulator::block.y})
#define gridDim (Dim{emulator::block.grid_x, emulator::block.grid_y})

inline int min(int a, int b) { return a < b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __log2f(float x) { return log2f(x); }
template <typename To, typename From>
To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &x, sizeof to);
  return to;
}

inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }

// Each lane brings its value and the lane it wants to hear from.
template <typename T>
T exchange(const char* what, T value, int from) {
  struct Lane {
    T value;
    int from;
    T heard;
  } mine{value, from, value};
  emulator::together(what, &mine, [](void** lanes) {
    for (int i = 0; i < 32; ++i) {
      Lane& lane = *static_cast<Lane*>(lanes[i]);
      lane.heard = static_cast<Lane*>(lanes[lane.from])->value;
    }
  });
  return mine.heard;
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return exchange("shfl", value, from % 32);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int with) {
  return exchange("shfl.xor", value, (threadIdx.x ^ with) % 32);
}

inline unsigned __ballot_sync(unsigned, bool mine) {
  unsigned bits = unsigned(mine);
  emulator::together("ballot", &bits, [](void** lanes) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= *static_cast<unsigned*>(lanes[i]) << i;
    for (int i = 0; i < 32; ++i) *static_cast<unsigned*>(lanes[i]) = all;
  });
  return bits;
}
inline int __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }

template <typename Reduce>
unsigned reduce(const char* what, unsigned mine, Reduce work) {
  emulator::together(what, &mine, [work](void** lanes) {
    unsigned all = *static_cast<unsigned*>(lanes[0]);
    for (int i = 1; i < 32; ++i) all = work(all, *static_cast<unsigned*>(lanes[i]));
    for (int i = 0; i < 32; ++i) *static_cast<unsigned*>(lanes[i]) = all;
  });
  return mine;
}
inline unsigned __reduce_max_sync(unsigned, unsigned mine) {
  return reduce("redux.max", mine, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned mine) {
  return reduce("redux.min", mine, [](unsigned a, unsigned b) { return a < b ? a : b; });
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const uint64_t bytes = x | uint64_t(y) << 32;
  unsigned to = 0;
  for (int i = 0; i < 4; ++i) to |= unsigned(bytes >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  return to;
}
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fdividef(float x, float y) { return x / y; }
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}

inline void __syncwarp() {
  emulator::together("syncwarp", nullptr, [](void**) {});
}
inline void __syncthreads() { emulator::block_barrier(0, emulator::kThreads); }
inline int __syncthreads_or(bool mine) {
  static int any;
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  any |= mine;
  __syncthreads();
  const int found = any;
  __syncthreads();
  return found;
}
