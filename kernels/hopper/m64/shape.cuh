// SPDX-License-Identifier: Apache-2.0
// Shared memory of the Hopper kernel for many query rows: 64 of them a block, on the M side.
#pragma once

#include "hopper/shape.cuh"

namespace tv::hopper::m64 {

struct Shape {
  static constexpr int kQueryRows = 64;
  static constexpr int kStages = hopper::kStages;
  static constexpr int kParts = 4;             // of V, given back one by one
  static constexpr bool kOddLastFirst = true;  // panels of odd tiles are loaded last to first
  static constexpr int kQPanelBytes = kQueryRows * 128;
  static constexpr int kProbBytes = kQueryRows * kTile * 2;

  static constexpr int kQRope = kRopePanel * kQPanelBytes;  // kept in registers once read
  static constexpr int kValues = kPanels * kQPanelBytes;
  static constexpr int kRope = kValues + kStages * kRopePanel * kPanelBytes;
  static constexpr int kRopeStride = kPanelBytes;
  static constexpr int kProb = kRope + kStages * kRopeStride;  // P of even tiles; that of odd ones replaces kQRope
  static constexpr int kReference = kProb + kProbBytes;        // fp32 [tile % 2][row]: after that tile
  static constexpr int kSums = kReference + 2 * kQueryRows * 4;
  static constexpr int kJob = kSums + 2 * kQueryRows * 4;
  static constexpr int kBarriers = kJob + 32;

  // Barriers, 8 bytes each.
  static constexpr int kFull = kBarriers;                // [stage][third] landed
  static constexpr int kFree = kFull + 8 * kStages * 3;  // [stage][part] read; the last part: the rope panel too
  static constexpr int kProbFull = kFree + 8 * kStages * kParts;  // [stage] P and references written
  static constexpr int kQueryFull = kProbFull + 8 * kStages;
  static constexpr int kSmemBytes = kQueryFull + 8;

  // The output rows at the end, over Q and V.
  static constexpr int kOutStride = kLatent + 8;  // floats; conflict-free for the fragments
  static_assert(kQueryRows * kOutStride * 4 <= kRope);

  static_assert(kProbBytes == kQPanelBytes && kProb % 1024 == 0 && kStages == 2);
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace tv::hopper::m64
