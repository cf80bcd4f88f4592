// SPDX-License-Identifier: Apache-2.0
// From a row of a request to its token and head, and to where it lies in a tensor.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"

namespace tv::portable {

struct RowPlace {
  int first_token, heads;
  float inverse;

  __device__ __forceinline__ RowPlace(const TvVerifyParams& p, const Request& req)
      : first_token(req.first_token), heads(p.heads), inverse(reciprocal_approx(float(p.heads))) {}

  // row / heads for any row below 2^20: the half keeps the quotient further from a whole number than it can be wrong.
  __device__ __forceinline__ int node(int row) const { return int((float(row) + 0.5f) * inverse); }

  // Offset in elements. A stride fits 32 bits, the offset may not.
  __device__ __forceinline__ int64_t at(int row, int64_t stride_t, int64_t stride_h) const {
    const int i = node(row);
    return int64_t(first_token + i) * int(stride_t) + int64_t(row - i * heads) * int(stride_h);
  }
};

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

}  // namespace tv::portable
