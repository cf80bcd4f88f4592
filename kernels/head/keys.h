// SPDX-License-Identifier: Apache-2.0
// Logits as integers that compare as the logits do. A candidate is a key above the complement of a token id, so that
// the larger of two has the larger logit or, of equal ones, the smaller id. Host and device share it.
#pragma once

#include <stdint.h>
#include <string.h>

#include "index.h"

namespace tv::head {

constexpr int kEach = 32;             // entries a thread looks at
constexpr int kListThreads = 256;     // of a block that makes a list
constexpr int kMergeThreads = 512;    // of a block that merges the lists of a row
constexpr int kSlice = 8192;          // logits behind a list
constexpr int kMaxTopK = 255;         // candidates of a list
constexpr int kMaxMerged = 512 * 32;  // candidates of all lists of a row
static_assert(kSlice == kListThreads * kEach && kMaxMerged == kMergeThreads * kEach);

// All ones for a negative float's bits, else 0: the smaller of two negative numbers has the larger bits.
TV_HD uint32_t sign_mask(uint32_t bits) { return uint32_t(int32_t(bits) >> 31); }

// NaN is above all, -0 equals 0. No logit has key 0: it stands for none.
TV_HD uint32_t key_of(float logit) {
  const float unsigned_zero = logit + 0.0f;
  uint32_t bits;
  memcpy(&bits, &unsigned_zero, sizeof bits);
  const uint32_t key = bits ^ (sign_mask(bits) | 0x80000000u);
  return logit == logit ? key : 0xffffffffu;
}

TV_HD float logit_of(uint32_t key) {
  const uint32_t bits = key ^ (sign_mask(~key) | 0x80000000u);
  float logit;
  memcpy(&logit, &bits, sizeof logit);
  return logit;
}

// What exponents are relative to, given the largest logit: infinity minus infinity would be NaN.
TV_HD float exponent_base(float largest) { return largest - largest == 0 || largest != largest ? largest : 0; }

TV_HD uint64_t candidate(uint32_t key, uint32_t id) { return uint64_t(key) << 32 | uint32_t(~id); }
TV_HD uint32_t key_in(uint64_t candidate) { return uint32_t(candidate >> 32); }
TV_HD uint32_t id_in(uint64_t candidate) { return ~uint32_t(candidate); }

}  // namespace tv::head
