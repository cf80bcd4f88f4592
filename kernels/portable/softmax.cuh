// SPDX-License-Identifier: Apache-2.0
// Online softmax. One warp does 8 rows: 4 lanes a row, each with every position h * 16 + 4 * quad + e of a tile.
#pragma once

#include "device.cuh"
#include "portable/ptx.cuh"
#include "portable/shape.cuh"

namespace tv::portable {

// Raw scores into base-2 logits: x * scale, or with the soft cap tanh(x * inner / (2 log2 e)) * scale.
struct Logits {
  bool has_cap;
  float scale, inner;

  // `sm_scale` holds for scores as they are, in whatever unit.
  __device__ __forceinline__ Logits(const TvVerifyParams& p, float sm_scale) {
    constexpr float kLog2e = 1.4426950408889634f;
    has_cap = p.logit_cap > 0;
    scale = (has_cap ? p.logit_cap : sm_scale) * kLog2e;
    inner = has_cap ? 2 * kLog2e * sm_scale * reciprocal_approx(p.logit_cap) : 0;
  }
  __device__ __forceinline__ float tanh(float x) const { return 1 - 2 * reciprocal_approx(1 + exp2_approx(x * inner)); }
};

// The state of a lane's row. P is taken relative to `base`, which follows the row's maximum only when that has grown by
// more than kSlack: until then P stays below 2^kSlack, and everything summed so far needs no new factor. Where P is
// fp16 for the pool's sake, not the caller's, it is 2^kLead times that: so its smallest value is 2^-24 / 2^kLead of the
// row's largest, as good as nothing even if a million positions have less.
template <typename T, typename C>
struct Softmax {
  static constexpr float kSlack = 8;
  static constexpr float kLead = C::Pool::kFp8 ? 7 : 0;

  int row;   // within the block
  int quad;  // which 4 of 16 positions
  float base = -INFINITY;
  float sum = 0;  // the lane's own share

  // Rows are dealt so that 8 lanes, which a 16-byte load serves at once, have two rows 4 apart: no bank twice.
  __device__ __forceinline__ Softmax(int eight, int lane) : row(8 * eight + (lane >> 3) + (lane & 4)), quad(lane & 3) {}

  // The logits of a tile: sums over the slices, always in the same order. `seen` has a bit for each position.
  __device__ __forceinline__ void gather(const float* scores, float (&x)[4 * C::kK16]) const {
    const float* src = scores + row * C::kScoreStride + 4 * quad;
#pragma unroll
    for (int h = 0; h < C::kK16; ++h) {
      float4 part[C::kSlices];
#pragma unroll
      for (int s = 0; s < C::kSlices; ++s) {
        part[s] = *reinterpret_cast<const float4*>(src + s * C::kRows * C::kScoreStride + 16 * h);
      }
      x[4 * h] = (part[0].x + part[1].x) + (part[2].x + part[3].x);
      x[4 * h + 1] = (part[0].y + part[1].y) + (part[2].y + part[3].y);
      x[4 * h + 2] = (part[0].z + part[1].z) + (part[2].z + part[3].z);
      x[4 * h + 3] = (part[0].w + part[1].w) + (part[2].w + part[3].w);
    }
  }

  // What few tiles or few models need, all behind one branch: the soft cap, and the positions hidden whose bit in
  // `seen` is clear. A scale that is negative would show what is hidden: so it is applied here, and 1 is left to apply.
  __device__ __forceinline__ float special(const Logits& logits, uint64_t seen, float (&x)[4 * C::kK16]) const {
    const auto bits = std::conditional_t<(C::kK16 > 2), uint64_t, uint32_t>(seen) >> (4 * quad);
#pragma unroll
    for (int h = 0; h < C::kK16; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& v = x[4 * h + e];
        v = (logits.has_cap ? logits.tanh(v) : v) * logits.scale;
        if (!(bits >> (16 * h + e) & 1)) v = -INFINITY;
      }
    }
    return 1;
  }

  // Takes the scores of a tile, leaves P and the factor for what was summed before; true where that matters:
  // not where the row has seen nothing before.
  __device__ __forceinline__ bool update(float scale, float (&x)[4 * C::kK16], T* prob, float* factors) {
#pragma unroll
    for (float& v : x) v *= scale;
    float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
#pragma unroll
    for (int h = 1; h < C::kK16; ++h) {
      top = fmaxf(top, fmaxf(fmaxf(x[4 * h], x[4 * h + 1]), fmaxf(x[4 * h + 2], x[4 * h + 3])));
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const bool grown = top > base + (kSlack + kLead);
    if constexpr (C::Pool::kFp8) top -= kLead;
    const float factor = grown ? exp2_approx(base - top) : 1;
    const bool matters = grown && base != -INFINITY;
    base = grown ? top : base;
    const float zero = base == -INFINITY ? 0 : base;  // nothing visible so far
    sum *= factor;
#pragma unroll
    for (int h = 0; h < C::kK16; ++h) {
      uint32_t pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = round2<T>(exp2_approx(x[4 * h + 2 * i] - zero), exp2_approx(x[4 * h + 2 * i + 1] - zero));
        const float2 rounded = widen2<T>(pair[i]);
        sum += rounded.x + rounded.y;
      }
      *reinterpret_cast<uint2*>(prob + row * C::kProbStride + 16 * h + 4 * quad) = {pair[0], pair[1]};
    }
    if (quad == 0) factors[row] = factor;
    return matters;
  }

  // Sum of the row over all tiles.
  __device__ __forceinline__ float total() const {
    const float pair = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
    return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
  }
};

}  // namespace tv::portable
