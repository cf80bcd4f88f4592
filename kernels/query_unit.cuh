// SPDX-License-Identifier: Apache-2.0
// The unit that a block's Q is measured in where a pool of fp8 makes it fp16.
#pragma once

#include "device.cuh"

namespace tv {

// The power of 2 that brings the largest finite element of a block's Q, which is bf16, to 2^14 .. 2^15, and its
// inverse. So none is too large for fp16, and none that counts too small: those below 2^-28 of the largest lose bits.
struct QueryUnit {
  float factor, inverse;

  // `largest`: each warp's, as the bits of a float.
  __device__ __forceinline__ explicit QueryUnit(const uint32_t* largest) {
    uint32_t bits = largest[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) bits = max(bits, largest[i]);
    const int exponent = max(int(bits >> 23), 32);  // an inverse that is no normal float would be 0
    factor = __uint_as_float(uint32_t(268 - exponent) << 23);
    inverse = __uint_as_float(uint32_t(exponent - 14) << 23);
  }
};

}  // namespace tv
