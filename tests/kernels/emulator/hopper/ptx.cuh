// SPDX-License-Identifier: Apache-2.0
// Takes the place of kernels/hopper/ptx.cuh, as far as pools of fp8 go.
#pragma once

#include <cuda_fp8.h>

#include "basic_ptx.cuh"
#include "hopper/shape.cuh"
#include "matrices.h"

namespace tv::hopper {

inline void barrier_init(uint32_t addr, int arrivals) {
  emulator::shared(addr, 8);
  if (emulator::block.mbarrier_count == 32) emulator::fail("more mbarriers than the emulator has");
  emulator::block.mbarriers[emulator::block.mbarrier_count++] = {addr, arrivals, arrivals, 0};
}
inline void barrier_arrive(uint32_t addr) { emulator::arrive(emulator::mbarrier(addr)); }
inline void barrier_arrive_after_copies(uint32_t addr) { emulator::start_copy({addr, nullptr, 0, false}); }
inline void barrier_wait(uint32_t addr, int parity) {
  const emulator::MBarrier& barrier = emulator::mbarrier(addr);
  if (emulator::block.waits_hold) emulator::wait_until([&] { return (barrier.completed & 1) != parity; });
}

inline void store_shared16(uint32_t dst, const uint4& v) { memcpy(emulator::shared(dst, 16), &v, 16); }

template <int kCount>
void sync_threads(int id) {
  emulator::block_barrier(id, kCount);
}

template <int kCount>
bool sync_threads_or(int id, bool mine) {
  static bool any[16];
  sync_threads<kCount>(id);
  any[id] = false;
  sync_threads<kCount>(id);
  any[id] |= mine;
  sync_threads<kCount>(id);
  return any[id];
}

inline void fence_async_reads() {}
template <int>
void keep_registers() {}
template <int>
void take_registers() {}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) { emulator::ldmatrix("ldmatrix.x4", false, r, addr); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) { emulator::ldmatrix("ldmatrix.trans", true, r, addr); }
inline void stmatrix_x4_trans(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulator::stmatrix_trans<4>("stmatrix.x4.trans", addr, {a, b, c, d});
}
inline void stmatrix_x2_trans(uint32_t addr, uint32_t a, uint32_t b) {
  emulator::stmatrix_trans<2>("stmatrix.x2.trans", addr, {a, b});
}

inline uint32_t finite_bf16(uint32_t pair) {
  const float low = same_bits<float>(pair << 16), high = same_bits<float>(pair & 0xffff0000u);
  return same_bits<uint32_t>(__floats2bfloat162_rn(low * 0 + low, high * 0 + high));
}
inline uint32_t greater_bf16(uint32_t a, uint32_t b) {
  const float low = fmaxf(same_bits<float>(a << 16), same_bits<float>(b << 16));
  const float high = fmaxf(same_bits<float>(a & 0xffff0000u), same_bits<float>(b & 0xffff0000u));
  return same_bits<uint32_t>(__floats2bfloat162_rn(low, high));
}

inline void halves_of(uint32_t four, __nv_fp8_interpretation_t kind, uint32_t& low, uint32_t& high) {
  low = same_bits<uint32_t>(__nv_cvt_fp8x2_to_halfraw2(uint16_t(four), kind));
  high = same_bits<uint32_t>(__nv_cvt_fp8x2_to_halfraw2(uint16_t(four >> 16), kind));
}
inline void halves_of(E4M3, uint32_t four, uint32_t& low, uint32_t& high) { halves_of(four, __NV_E4M3, low, high); }
inline void halves_of(E5M2, uint32_t four, uint32_t& low, uint32_t& high) { halves_of(four, __NV_E5M2, low, high); }

}  // namespace tv::hopper
