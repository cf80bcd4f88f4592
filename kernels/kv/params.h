// SPDX-License-Identifier: Apache-2.0
// The C ABI of moving KV rows. overlay/srt/treeverify/kv/abi.py mirrors this struct field by field
// (tests/kernels/test_kv_abi.py).
//
// A buffer holds the rows of one layer: MLA's latent, or K, or V. A slot is the same row of every buffer, so one list
// of moves serves all layers of all pools that share an allocator, whatever their rows' length.
//
// Entries are taken in groups of `group`: a group's rows are all read before any is written, so that inside of it a
// slot may be left and entered. No slot that one group enters may another leave or enter; with group 0 every entry is a
// group of its own. An entry that leads to where it is, or with a slot outside of the buffers, moves nothing.
#pragma once

#include <stdint.h>

typedef struct TvKvMoveParams {
  void* const* bases;        // [buffers], of row 0: multiples of 16
  const int64_t* row_bytes;  // [buffers]: multiples of 16
  const void* src;           // [capacity], slots, int32 or int64
  const void* dst;           // [capacity]
  const int32_t* count;      // [1]: entries that are there, the first ones; null: all
  int64_t slots;             // rows of every buffer
  int32_t index_bytes;       // of src and dst
  int32_t capacity, group;   // group 0 .. 256
  int32_t buffers, longest;  // bytes of the longest row
} TvKvMoveParams;

#ifdef __cplusplus
extern "C" {
#endif

// Returns 0 or a cudaError_t; only launches, never allocates or synchronises. The grid depends on capacity, group,
// buffers and longest alone.
int tv_kv_move(const TvKvMoveParams* params, void* stream);

#ifdef __cplusplus
}
#endif
