// SPDX-License-Identifier: Apache-2.0
// From a row of a request to its token and head, and to where it lies in a tensor.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "query_unit.cuh"

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

}  // namespace tv::portable
