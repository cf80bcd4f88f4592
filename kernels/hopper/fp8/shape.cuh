// SPDX-License-Identifier: Apache-2.0
// Shared memory of the Hopper kernel for pools of fp8.
#pragma once

#include "hopper/shape.cuh"

namespace tv::hopper::fp8 {

constexpr int kRowBytes = kKeyDim;  // of a position
constexpr int kTileBytes = kTile * kRowBytes;
constexpr float kProbLog2 = 7;  // P is fp16 and brought to 2^7 .. 2^15 at its largest: its small values keep their bits

// Byte offset of 16-byte chunk c of position r within a tile. Eight positions' same chunk lie in different banks, and
// so do four chunks of two positions.
TV_HD uint32_t tile_offset(int r, int c) { return r * kRowBytes + ((c ^ (r / 2 % 4)) << 4); }

template <int kRows>
struct Shape {
  static constexpr int kQueryRows = kRows;
  static constexpr int kParts = 2;  // of a tile, given back one by one
  static constexpr int kQPanelBytes = kRows * 128;
  static constexpr int kProbBytes = kRows * 128;

  // Q and P are fp16, the tiles as they are in the pool: as many as fit.
  static constexpr int kProb = kPanels * kQPanelBytes;
  static constexpr int kSums = kProb + 2 * kProbBytes;  // fp32 [kSumGroups][kRows]: of P, by each group of lanes
  static constexpr int kSumGroups = 64;
  static constexpr int kTiles = kSums + kSumGroups * kRows * 4;
  static constexpr int kSmall = 2048;  // what follows the tiles
  static constexpr int kFit = (227 * 1024 - kTiles - kSmall) / kTileBytes;
  static constexpr int kStages = kFit < 4 ? kFit : 4;
  static constexpr int kReference = kTiles + kStages * kTileBytes;  // fp32 [2][kRows], before and after a move
  static constexpr int kJob = kReference + 2 * kRows * 4;
  static constexpr int kMoved = kJob + 32;        // int32 [2]
  static constexpr int kUnit = kMoved + 8;        // of Q
  static constexpr int kLargest = kUnit + 8;      // of Q, a word a warp
  static constexpr int kVisible = kLargest + 32;  // bits of a tile's positions [group][kRows]
  static constexpr int kBarriers = kVisible + 2 * kRows * 8;

  // Barriers, 8 bytes each.
  static constexpr int kFull = kBarriers;                         // [stage][third] landed
  static constexpr int kFree = kFull + 8 * kStages * 3;           // [stage][part] read
  static constexpr int kProbFull = kFree + 8 * kStages * kParts;  // [tile % 2] P written
  static constexpr int kQueryFull = kProbFull + 8 * 2;
  static constexpr int kSmemBytes = kQueryFull + 8;
  static_assert(kSmemBytes - kReference <= kSmall && kStages >= 3 && kBarriers % 8 == 0);

  // Scratch of the softmax, where P of the tile comes: column maxima of 16 groups of lanes.
  static constexpr int kMaxima = 16;
  static_assert(kMaxima * kRows * 4 <= kProbBytes);

  // Scratch at the end, where Q was and beyond: inverses of the rows' sums, the output rows.
  static constexpr int kInverse = 0;
  static constexpr int kOutRows = (kInverse + kRows * 4 + 15) / 16 * 16;
  static constexpr int kOutStride = kLatent + 4;  // floats; conflict-free for the fragments
  static_assert(kOutRows + kRows * kOutStride * 4 <= kReference);
  static_assert(kRows % 8 == 0 && kRows <= kMaxRowTile && sizeof(Job) <= 32);
};

}  // namespace tv::hopper::fp8
