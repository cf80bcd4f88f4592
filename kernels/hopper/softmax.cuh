// SPDX-License-Identifier: Apache-2.0
// Online softmax over the columns of S^T: a column is a query row, its positions lie in 8 lanes of each of 4 warps.
//
// Sums are kept relative to a reference that lies at most kLazyRescale below the largest logit so far. A tile that
// stays within it, as nearly all do, needs no maxima: one vote, and its exponentials. Only where a logit outgrows the
// reference are maxima taken, references moved and sums scaled.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"

namespace tv::hopper {

__device__ __forceinline__ uint32_t pack2(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t pack2(__half, float a, float b) {
  const __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

__device__ __forceinline__ float2 unpack2(__nv_bfloat16, uint32_t v) {
  return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack2(__half, uint32_t v) {
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}

// A reference to subtract: 0 for a row that has seen nothing yet.
__device__ __forceinline__ float finite(float reference) { return reference == -INFINITY ? 0 : reference; }

// Caps raw scores where the layer does. Returns what still has to scale them to base-2 logits. A product of a query and
// a key is `unit` times the raw score.
template <int kN8>
__device__ __forceinline__ float capped(const TvVerifyParams& p, float (&s)[kN8][4], float unit = 1) {
  constexpr float kLog2e = 1.4426950408889634f;
  const float scale = p.sm_scale * kLog2e * unit;
  if (!(p.logit_cap > 0)) return scale;
  const float cap = p.logit_cap * kLog2e, twice = 2 * scale / p.logit_cap;
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = cap - __fdividef(2 * cap, 1 + exp2_approx(s[j][i] * twice));  // cap tanh
  }
  return 1;
}

// Raw scores to base-2 logits less the reference of their row.
template <int kN8>
__device__ __forceinline__ void to_exponents(const TvVerifyParams& p, const float* reference, int lane,
                                             float (&s)[kN8][4], float unit = 1) {
  const float scale = capped(p, s, unit);
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    const float2 base = *reinterpret_cast<const float2*>(reference + 8 * j + 2 * (lane % 4));
    const float a = finite(base.x), b = finite(base.y);
    s[j][0] = s[j][0] * scale - a, s[j][1] = s[j][1] * scale - b;
    s[j][2] = s[j][2] * scale - a, s[j][3] = s[j][3] * scale - b;
  }
}

template <int kN8>
__device__ __forceinline__ float largest(const float (&s)[kN8][4]) {
  float top[4] = {s[0][0], s[0][1], s[0][2], s[0][3]};
#pragma unroll
  for (int j = 1; j < kN8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = fmaxf(top[i], s[j][i]);
  }
  return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}

// Bits of the 64 positions from `tile` on that row `i` of the block sees. Asks for the request anew: it is needed in a
// split's last tile or two, and not worth registers before.
__device__ __forceinline__ uint64_t visible_bits(const TvVerifyParams& p, const Job& job, int i, int row, int tile) {
  const int first = tile - job.prefix;
  const Request req(p, job.b);
  const uint64_t seen = i < job.rows ? Mask(p, req, job.b).window(row / p.heads, req.n, first) : low_bits(-first);
  return seen & low_bits(job.end - tile);
}

template <int kN8>
__device__ __forceinline__ void hide(float (&s)[kN8][4], const uint32_t* visible, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t bits = visible[2 * (8 * j + 2 * (lane % 4) + c) + warp / 2] >> (16 * (warp % 2) + lane / 4);
      if (!(bits & 1)) s[j][c] = -INFINITY;
      if (!(bits >> 8 & 1)) s[j][c + 2] = -INFINITY;
    }
  }
}

// Maxima of 4 positions each, into `maxima` [16][kN8 * 8]: the rest is left to whoever reads them.
template <int kN8>
__device__ __forceinline__ void partial_maxima(const float (&s)[kN8][4], float* maxima, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    float a = fmaxf(s[j][0], s[j][2]), b = fmaxf(s[j][1], s[j][3]);
    a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, 16));
    b = fmaxf(b, __shfl_xor_sync(0xffffffffu, b, 16));
    if (lane < 16)
      *reinterpret_cast<float2*>(maxima + (4 * warp + lane / 4) * kN8 * 8 + 8 * j + 2 * (lane % 4)) = {a, b};
  }
}

// Where the reference of a row stands after a tile whose largest exponent is `top`. It lies `below` the largest logit.
__device__ __forceinline__ float next_reference(float reference, float top, float below = 0) {
  return reference == -INFINITY ? top - below : top > kLazyRescale + below ? reference + (top - below) : reference;
}

// Exponents against the references before to exponents against those after.
template <int kN8>
__device__ __forceinline__ void move_exponents(const float* before, const float* after, int lane, float (&s)[kN8][4]) {
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * j + 2 * (lane % 4) + c;
      const float step = finite(after[row]) - finite(before[row]);
      s[j][c] -= step, s[j][c + 2] -= step;
    }
  }
}

// A thread's share of the sums, and the factor for what was summed against an older reference.
template <int kN8>
struct Sums {
  float sum[kN8][2];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int j = 0; j < kN8; ++j) sum[j][0] = sum[j][1] = 0;
  }

  template <int kTiles>
  __device__ __forceinline__ void rescale(const float* before, const float* after, int lane,
                                          float (&o)[kTiles][kN8][4]) {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + 2 * (lane % 4) + c;
        const float scale = exp2_approx(before[row] - after[row]), factor = before[row] == after[row] ? 1 : scale;
        sum[j][c] *= factor;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) o[m][j][c] *= factor, o[m][j][c + 2] *= factor;
      }
    }
  }

  // Exponents to P, rounded and packed in pairs of rows; what is summed is what is multiplied.
  template <typename T>
  __device__ __forceinline__ void exponentials(const float (&s)[kN8][4], uint32_t (&packed)[kN8][2]) {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      packed[j][0] = pack2(T(), exp2_approx(s[j][0]), exp2_approx(s[j][1]));
      packed[j][1] = pack2(T(), exp2_approx(s[j][2]), exp2_approx(s[j][3]));
      const float2 a = unpack2(T(), packed[j][0]), b = unpack2(T(), packed[j][1]);
      sum[j][0] += a.x + b.x, sum[j][1] += a.y + b.y;
    }
  }

  // Into `sums` [64][kN8 * 8], to be added up by whoever reads them.
  __device__ __forceinline__ void store(float* sums, int warp, int lane) const {
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      *reinterpret_cast<float2*>(sums + (8 * warp + lane / 4) * kN8 * 8 + 8 * j + 2 * (lane % 4)) = {sum[j][0],
                                                                                                     sum[j][1]};
    }
  }
};

// P to shared memory as [row][position], for the products with V. Matrix l / 8 of a store: half l / 8 % 2 of the warp's
// positions, rows 8 (j + l / 16) and up.
template <int kN8>
__device__ __forceinline__ void store_prob(const uint32_t (&packed)[kN8][2], uint32_t prob, int warp, int lane) {
  const uint32_t dst = prob + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j + 1 < kN8; j += 2) {
    stmatrix_x4_trans(dst + j * 1024, packed[j][0], packed[j][1], packed[j + 1][0], packed[j + 1][1]);
  }
  if constexpr (kN8 % 2) stmatrix_x2_trans(dst + (kN8 - 1) * 1024, packed[kN8 - 1][0], packed[kN8 - 1][1]);
}

}  // namespace tv::hopper
