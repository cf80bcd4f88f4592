// SPDX-License-Identifier: Apache-2.0
// Takes the place of kernels/portable/ptx.cuh. Fragments are laid out over the lanes as the PTX manual says.
// What the kernel's file has and its headers call, this one must have too.
#pragma once

#include "basic_ptx.cuh"
#include "matrices.h"

namespace tv::portable {

inline int opaque(int x) { return x; }
inline uint32_t kept(uint32_t x) { return x; }

inline int load_shared(uint32_t addr) {
  int x;
  memcpy(&x, emulator::shared(addr, 4), 4);
  return x;
}
inline void store_shared(uint32_t addr, int x) { memcpy(emulator::shared(addr, 4), &x, 4); }

template <int kBytes>
void cp_async_small(uint32_t dst, const void* src) {
  static_assert(kBytes == 4 || kBytes == 8);
  emulator::start_copy({dst, src, kBytes, true});
}

inline void mbarrier_init(uint32_t addr, int arrivals) {
  emulator::shared(addr, 8);
  if (emulator::block.mbarrier_count == 32) emulator::fail("more mbarriers than the emulator has");
  emulator::block.mbarriers[emulator::block.mbarrier_count++] = {addr, arrivals, arrivals, 0};
}
inline void mbarrier_arrive_warp(uint32_t addr, int lane) {
  __syncwarp();
  if (lane == 0) emulator::arrive(emulator::mbarrier(addr));
}
inline void mbarrier_arrive_after_copies(uint32_t addr) { emulator::start_copy({addr, nullptr, 0, false}); }
inline void mbarrier_wait(uint32_t addr, uint32_t parity) {
  const emulator::MBarrier& barrier = emulator::mbarrier(addr);
  if (emulator::block.waits_hold) {
    emulator::wait_until([&] { return uint32_t(barrier.completed & 1) != parity; });
  }
}

using emulator::ldmatrix;
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) { ldmatrix("ldmatrix.x4", false, r, addr); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) { ldmatrix("ldmatrix.x4.trans", true, r, addr); }
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr) { ldmatrix("ldmatrix.x2", false, r, addr); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr) { ldmatrix("ldmatrix.x2.trans", true, r, addr); }

template <uint32_t kSelect>
uint32_t permute_bytes(uint32_t x) {
  uint32_t to = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = kSelect >> (4 * i) & 7;
    if (from < 4) to |= (x >> (8 * from) & 0xff) << (8 * i);
  }
  return to;
}

// By the value: bias 7, three bits of mantissa, no infinities.
inline uint32_t e4m3_as_fp16(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  float x = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  if ((byte & 127) == 127) x = NAN;
  return same_bits<uint16_t>(__float2half_rn(byte >> 7 ? -x : x));
}
template <bool kUpper>
uint32_t convert_e4m3(uint32_t word) {
  const uint32_t pair = kUpper ? word >> 16 : word;
  return e4m3_as_fp16(uint8_t(pair)) | e4m3_as_fp16(uint8_t(pair >> 8)) << 16;
}

template <typename T>
float2 widen2(uint32_t pair);
template <>
inline float2 widen2<__nv_bfloat16>(uint32_t pair) {
  return {same_bits<float>(pair << 16), same_bits<float>(pair & 0xffff0000u)};
}
template <>
inline float2 widen2<__half>(uint32_t pair) {
  return __half22float2(same_bits<__half2>(pair));
}

inline uint32_t finite_bf16(uint32_t pair) {
  const float2 x = widen2<__nv_bfloat16>(pair);
  return same_bits<uint32_t>(__floats2bfloat162_rn(x.x * 0 + x.x, x.y * 0 + x.y));
}
inline uint32_t greater_bf16(uint32_t a, uint32_t b) {
  const float2 x = widen2<__nv_bfloat16>(a), y = widen2<__nv_bfloat16>(b);
  return same_bits<uint32_t>(__floats2bfloat162_rn(fmaxf(x.x, y.x), fmaxf(x.y, y.y)));
}

template <typename T>
uint32_t round2(float x, float y);
template <>
inline uint32_t round2<__nv_bfloat16>(float x, float y) {
  return same_bits<uint32_t>(__floats2bfloat162_rn(x, y));
}
template <>
inline uint32_t round2<__half>(float x, float y) {
  return same_bits<uint32_t>(__floats2half2_rn(x, y));
}

template <typename T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool on) {
  struct Lane {
    float* d;
    const uint32_t *a, *b;
    bool on;
  } mine{d, a, b, on};
  emulator::together("mma", &mine, [](void** lanes) {
    using Row __attribute__((vector_size(32))) = float;
    float left[16][16], right[16][8];
    for (int i = 0; i < 32; ++i) {
      const Lane& lane = *static_cast<Lane*>(lanes[i]);
      if (lane.on != static_cast<Lane*>(lanes[0])->on) emulator::fail("mma: lanes differ in whether it is on");
      const int row = i / 4, col = 2 * (i % 4);
      for (int r = 0; r < 4; ++r) {
        const float2 pair = widen2<T>(lane.a[r]);
        float* dst = left[row + r % 2 * 8] + col + r / 2 * 8;
        dst[0] = pair.x, dst[1] = pair.y;
      }
      for (int r = 0; r < 2; ++r) {
        const float2 pair = widen2<T>(lane.b[r]);
        right[col + r * 8][row] = pair.x, right[col + r * 8 + 1][row] = pair.y;
      }
    }
    if (!static_cast<Lane*>(lanes[0])->on) return;
    Row factors[16];
    memcpy(factors, right, sizeof right);
    for (int row = 0; row < 16; ++row) {
      Row sum = {};
      for (int k = 0; k < 16; ++k) sum += left[row][k] * factors[k];
      for (int c = 0; c < 8; ++c) static_cast<Lane*>(lanes[row % 8 * 4 + c / 2])->d[row / 8 * 2 + c % 2] += sum[c];
    }
  });
}

inline float reciprocal_approx(float x) { return 1 / x * (1 + 6e-8f); }  // an ulp off, as the instruction may be

template <typename T>
void store4(T* dst, float4 v) {
  if (uintptr_t(dst) % 8) emulator::fail("a store of 8 bytes to a misaligned address");
  const uint32_t pairs[2] = {round2<T>(v.x, v.y), round2<T>(v.z, v.w)};
  memcpy(dst, pairs, 8);
}

}  // namespace tv::portable
