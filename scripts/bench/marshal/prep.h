// SPDX-License-Identifier: Apache-2.0
// What the two C++ ways share: a step's own arguments of mla_prep into the struct, with the checks that Python makes.
#pragma once

#include <stdint.h>

#include "params.h"

extern "C" int tv_mla_prep(const TvPrepParams* params, void* stream);

struct Given {
  void* data;
  int64_t numel;
  int bytes;  // an element
  bool integer, contiguous;
};

inline bool is_index(const Given& t, int64_t entries) {
  return t.integer && (t.bytes == 4 || t.bytes == 8) && t.contiguous && t.numel >= entries;
}

// Null, or what is wrong. `p` holds the rest.
inline const char* prep_step(TvPrepParams* p, const Given& rows, const Given& lens, const Given* mask, int64_t kind,
                             int64_t raw_bs) {
  if (raw_bs < 0 || raw_bs > p->bs) return "raw_bs is not within the batch size";
  if (!is_index(rows, raw_bs) || rows.bytes != 8) return "req_pool_indices is not int64, contiguous and long enough";
  if (!is_index(lens, raw_bs)) return "seq_lens is not int32 or int64, contiguous and long enough";
  if (kind < TV_MASK_NONE || kind > TV_MASK_QLEN || (kind != TV_MASK_NONE && mask == nullptr)) return "no such mask";
  const bool packed = kind == TV_MASK_PACKED;
  if (mask && (!mask->contiguous || mask->bytes != (packed ? 8 : 1))) return "the mask has another form";
  if (packed && mask->numel < raw_bs * p->n * ((p->n + 63) / 64)) return "the mask is too short";
  p->req_pool_indices = static_cast<const int64_t*>(rows.data);
  p->seq_lens = lens.data, p->seq_len_bytes = lens.bytes;
  p->custom_mask = mask ? mask->data : nullptr, p->mask_numel = mask ? mask->numel : 0;
  p->mask_kind = static_cast<int32_t>(kind), p->raw_bs = static_cast<int32_t>(raw_bs);
  return tv_mla_prep(p, nullptr) ? "the launch failed" : nullptr;
}
