// SPDX-License-Identifier: Apache-2.0
// Everything a verify step needs to know about its batch, in one launch: kv_indptr, kv_indices (prefix and draft slots)
// and the packed mask, into buffers the backend owns. Reads SGLang's tensors as they are.
//
// Block (x, b) belongs to request b; the x blocks share the copy of its slots, block 0 also packs its mask. Each block
// finds where its request starts by summing the lengths before it, so nothing waits for another block.
#pragma once

#include "device.cuh"

namespace tv {

constexpr int kPrepThreads = 256;

__device__ __forceinline__ int kv_len(const TvPrepParams& p, int b) {
  // A row of req_to_token holds no more than row_stride slots.
  return b < p.raw_bs ? int(min(load_index(p.seq_lens, p.seq_len_bytes, b) + p.n, p.row_stride)) : 0;
}

// Sum of the lengths of requests 0 .. b - 1, the same in every thread.
__device__ __forceinline__ int64_t kv_start(const TvPrepParams& p, int b) {
  __shared__ int64_t total;
  __shared__ int64_t part[kPrepThreads / 32];
  int64_t sum = 0;
  for (int i = threadIdx.x; i < b; i += kPrepThreads) sum += kv_len(p, i);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    total = 0;
    for (int w = 0; w < kPrepThreads / 32; ++w) total += part[w];
  }
  __syncthreads();
  return total;
}

template <typename Index>
__device__ __forceinline__ void copy_slots(const TvPrepParams& p, int b, int64_t start, int len) {
  const int32_t* src = p.req_to_token + p.req_pool_indices[b] * p.row_stride;
  Index* dst = static_cast<Index*>(p.kv_indices) + start;
  len = int(min(int64_t(len), p.kv_capacity - start));
  for (int i = blockIdx.x * kPrepThreads + threadIdx.x; i < len; i += gridDim.x * kPrepThreads) dst[i] = src[i];
}

// Packed words are copied as they are; padding is causal.
__device__ __forceinline__ void copy_mask(const TvPrepParams& p, int b) {
  const int words = mask_words(p.n);
  const int64_t base = int64_t(b) * p.n * words;
  const uint64_t* src = static_cast<const uint64_t*>(p.custom_mask) + base;
  for (int at = threadIdx.x; at < p.n * words; at += kPrepThreads) {
    p.packed_mask[base + at] = b < p.raw_bs ? src[at] : causal_word(at / words, at % words);
  }
}

// One warp a row: two ballots make a word. A mask that does not lie inside its tensor counts as none: causal.
__device__ __forceinline__ void pack_mask(const TvPrepParams& p, int b, int64_t start, int len) {
  ByteMask m = {0, 0, false};
  if (b < p.raw_bs && p.mask_kind == TV_MASK_FULL) m = full_mask(start * p.n, len - p.n, p.n, p.mask_numel);
  if (b < p.raw_bs && p.mask_kind == TV_MASK_QLEN) m = qlen_mask(int64_t(b) * p.n * p.n, p.n, p.mask_numel);
  const uint8_t* bytes = static_cast<const uint8_t*>(p.custom_mask) + m.base;
  const int words = mask_words(p.n), lane = threadIdx.x % 32;
  for (int at = threadIdx.x / 32; at < p.n * words; at += kPrepThreads / 32) {
    const int i = at / words, w = at % words;
    uint64_t word = causal_word(i, w);
    if (m.fits) {
      const int lo = 64 * w + lane, hi = lo + 32;
      const uint32_t low = __ballot_sync(0xffffffffu, lo < p.n && bytes[i * m.stride + lo] != 0);
      const uint32_t high = __ballot_sync(0xffffffffu, hi < p.n && bytes[i * m.stride + hi] != 0);
      word = uint64_t(high) << 32 | low;
    }
    if (lane == 0) p.packed_mask[(int64_t(b) * p.n + i) * words + w] = word;
  }
}

// What a thread of the launch does.
__device__ __forceinline__ void prep_block(const TvPrepParams& p) {
  const int b = blockIdx.y;
  const int64_t start = kv_start(p, b);
  const int len = kv_len(p, b);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      if (b == 0) p.kv_indptr[0] = 0;
      p.kv_indptr[b + 1] = int32_t(start + len);
    }
    if (p.mask_kind == TV_MASK_PACKED) {
      copy_mask(p, b);
    } else {
      pack_mask(p, b, start, len);
    }
  }
  if (b >= p.raw_bs) return;  // SGLang leaves stale request numbers there
  if (p.kv_index_bytes == 8) {
    copy_slots<int64_t>(p, b, start, len);
  } else {
    copy_slots<int32_t>(p, b, start, len);
  }
}

}  // namespace tv
