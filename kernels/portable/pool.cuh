// SPDX-License-Identifier: Apache-2.0
// What a KV pool holds, and how its fragments become those of the products.
//
// A pool of fp8 stays as it is on its way through shared memory, so that a row is half as much to copy and to keep, and
// is widened in registers, by whoever multiplies it: a word of four elements becomes two pairs of fp16, exactly, NaN
// and subnormal values included. Products of such a pool are of fp16: one instruction widens a pair to it, while to
// bf16, which holds e4m3 and e5m2 as well, it takes half a dozen.
#pragma once

#include <cuda_fp16.h>

#include "portable/ptx.cuh"

namespace tv::portable {

// Elements of the queries' own dtype: multiplied as they are.
struct AsQuery {
  static constexpr bool kFp8 = false;
  using Element = uint16_t;
  template <typename T>
  using Math = T;
};

// Two e4m3, the upper bytes of the halves of x, as fp16, where there is no instruction for it. Moved to their place
// they are 2^-8 times what they mean. What would be 480 is NaN: 137 times it is infinite, of any other value it is not.
__device__ __forceinline__ uint32_t widen_e4m3_by_bits(uint32_t x) {
  const uint32_t moved = (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u);
  const __half2 small = *reinterpret_cast<const __half2*>(&moved);
  const __half2 product = __hmul2(small, __float2half2_rn(137 * 256.0f));
  const __half2 checked = __hadd2(__hmul2(product, __float2half2_rn(0.0f)), __hmul2(small, __float2half2_rn(256.0f)));
  return *reinterpret_cast<const uint32_t*>(&checked);
}

// In both fp8 formats `neighbours` gives elements 0, 1 and 2, 3 of a word, `columns` elements 0, 2 and 1, 3.
struct E4M3 {
  static constexpr bool kFp8 = true;
  using Element = uint8_t;
  template <typename T>
  using Math = __half;

  __device__ __forceinline__ static void neighbours(uint32_t word, uint32_t& low, uint32_t& high) {
    low = widen<false>(word);
    high = widen<true>(word);
  }
  __device__ __forceinline__ static void columns(uint32_t word, uint32_t& even, uint32_t& odd) {
    neighbours(permute_bytes<0x3120>(word), even, odd);
  }

 private:
  template <bool kUpper>
  __device__ __forceinline__ static uint32_t widen(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    return widen_e4m3_by_bits(permute_bytes<kUpper ? 0x3424 : 0x1404>(word));
#else
    return convert_e4m3<kUpper>(word);
#endif
  }
};

// e5m2 is the upper half of an fp16.
struct E5M2 {
  static constexpr bool kFp8 = true;
  using Element = uint8_t;
  template <typename T>
  using Math = __half;

  __device__ __forceinline__ static void neighbours(uint32_t word, uint32_t& low, uint32_t& high) {
    low = permute_bytes<0x1404>(word);
    high = permute_bytes<0x3424>(word);
  }
  __device__ __forceinline__ static void columns(uint32_t word, uint32_t& even, uint32_t& odd) {
    even = permute_bytes<0x2404>(word);
    odd = permute_bytes<0x3414>(word);
  }
};

}  // namespace tv::portable
