// SPDX-License-Identifier: Apache-2.0
// Threads, shared memory and barriers of the Hopper path.
#pragma once

#include "index.h"

namespace tv::hopper {

constexpr int kMaxRowTile = 72;   // query rows a block: 9 tokens of 8 heads
constexpr int kFewRowTile = 48;   // up to here a block takes less time than one of the kernel for many rows (m64/)
constexpr int kManyRowTile = 64;  // of that kernel; its block takes three quarters of the time of one of 72 rows
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // one warpgroup loads, two compute
constexpr int kTile = 64;                 // KV positions a tile: the M of a wgmma
constexpr int kStages = 2;                // tiles in shared memory
constexpr int kPanels = kKeyDim / 64;     // a tile is held as panels of 64 dimensions: 128-byte rows
constexpr int kPanelBytes = kTile * 128;
constexpr int kRopePanel = kPanels - 1;
constexpr int kThird = kPanels / 3;       // panels that land together
constexpr int kHalf = (kPanels - 1) / 2;  // panels of V a warpgroup multiplies, and gives back together
constexpr int kLoaderRegisters = 40, kMathRegisters = 232;
static_assert(kLoaderRegisters + 2 * kMathRegisters <= 3 * (65536 / kThreads / 8 * 8),
              "what a block has from the start");
constexpr float kLazyRescale = 8;  // log2 units a maximum may grow before sums are scaled: P stays below 2^8

// Byte offset of 16-byte chunk c of row r within a panel.
TV_HD uint32_t panel_offset(int r, int c) { return r * 128 + ((c ^ (r & 7)) << 4); }

// Elements of a pool that are not of the queries' type.
struct E4M3 {};
struct E5M2 {};

// Whether a request with so many query rows gets the kernel for many rows, where there is one: not for a pool of fp8.
TV_HD bool has_many_rows(int rows) {
  return row_tile(rows, kMaxRowTile) > kFewRowTile &&
         3 * ceil_div(rows, kManyRowTile) <= 4 * ceil_div(rows, kMaxRowTile);
}

// What a block does, decided once and kept in shared memory.
struct Job {
  int begin, end;   // KV positions
  int prefix;       // of the request: positions before it are visible to all rows
  int b, rows;      // request, rows of it that this block has
  int first_token;  // of the request
  int slot;         // of the partial result; negative: the output is written
};

template <int kRows>
struct Shape {
  static constexpr int kQueryRows = kRows;
  static constexpr int kStages = hopper::kStages;
  static constexpr int kParts = 2;              // of V, given back one by one
  static constexpr bool kOddLastFirst = false;  // panels of odd tiles are loaded last to first
  static constexpr int kN8 = kRows / 8;
  static constexpr int kQPanelBytes = kRows * 128;
  static constexpr int kProbBytes = kRows * 128;

  // P of a tile replaces its rope panel, which is dead by then. Where it needs more room the two tiles share what lies
  // between their rope panels: P of tile 1 starts there.
  static constexpr int kBetween = kProbBytes > kPanelBytes ? kProbBytes - kPanelBytes : 0;
  static constexpr int kValues = kPanels * kQPanelBytes;
  static constexpr int kRope = kValues + kStages * kRopePanel * kPanelBytes;
  static constexpr int kRopeStride = kPanelBytes + kBetween;
  static constexpr int kReference = kRope + 2 * kPanelBytes + kBetween;  // fp32 [2][kRows], before and after a move
  static constexpr int kJob = kReference + 2 * kRows * 4;
  static constexpr int kMoved = kJob + 32;  // int32 [2]
  static constexpr int kBarriers = kMoved + 8;

  // Barriers, 8 bytes each.
  static constexpr int kFull = kBarriers;                // [stage][third] landed
  static constexpr int kFree = kFull + 8 * kStages * 3;  // [stage][part] read, with P; all parts: the rope panel too
  static constexpr int kProbFull =
      kFree + 8 * kStages * kParts;  // [stage] P written, and what the group after needs to know
  static constexpr int kQueryFull = kProbFull + 8 * kStages;
  static constexpr int kSmemBytes = kQueryFull + 8;

  // Scratch of the softmax, over the rope panel: column maxima of 16 groups of lanes, then visibility bits.
  static constexpr int kMaxima = 16;
  static constexpr int kScratchVisible = kMaxima * kRows * 4;
  static_assert(kScratchVisible + kRows * 8 <= kPanelBytes);

  // Scratch at the end, over Q and V: sums of 64 groups of lanes, their inverses, the output rows.
  static constexpr int kSums = 64;
  static constexpr int kInverse = kSums * kRows * 4;
  static constexpr int kOutRows = (kInverse + kRows * 4 + 15) / 16 * 16;
  static constexpr int kOutStride = kLatent + 4;  // floats; conflict-free for the fragments
  static_assert(kOutRows + kRows * kOutStride * 4 <= kRope);

  static_assert(kRows % 8 == 0 && kRows <= kMaxRowTile && kStages == 2 && kChunkUnit % kTile == 0);
  static_assert(sizeof(Job) <= 32);
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace tv::hopper
