// SPDX-License-Identifier: Apache-2.0
// How a block of 8 warps cuts up its work, and where things lie in its shared memory.
#pragma once

#include "index.h"
#include "portable/limits.h"

namespace tv::portable {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// What a block keeps of a row outside of registers.
struct Row {
  int64_t out;    // where it lies in the output, in elements
  int node;       // its token, counted within the request
  float inverse;  // of the sum of its softmax, at the end
};

// tileRows query rows by tilePositions KV positions a step, `stages` KV tiles in shared memory.
template <int tileRows, int tilePositions, int stages>
struct Shape {
  static constexpr int kRows = tileRows;
  static constexpr int kTile = tilePositions;
  static constexpr int kStages = stages;
  static constexpr int kN8 = kRows / 8;    // a product instruction takes 8 rows
  static constexpr int kK16 = kTile / 16;  // and 16 positions

  // Scores: 4 slices of the key dimension. A warp has one slice, and half of the positions or half of the rows. Slice w
  // takes dimensions 16 w .. 16 w + 15 of every 64: where those lie in a swizzled row does not depend on which 64.
  static constexpr int kSlices = 4;
  static constexpr int kSteps = kKeyDim / (16 * kSlices);
  static constexpr int kHalves = kTile / 16;                  // of the positions; where there are two, K is read once
  static constexpr int kGroups = kWarps / kSlices / kHalves;  // of the rows
  static constexpr int kScoreM = kK16 / kHalves;
  static constexpr int kScoreN = (kN8 + kGroups - 1) / kGroups;
  // Steps whose part of Q stays in shared memory, for want of registers: the last ones.
  static constexpr int kSharedSteps = kHalves == 2 && kRows > 40 ? 1 : 0;
  static constexpr int kSharedQueryRegs = 2 * kSharedSteps * kScoreN;  // of a lane, the same in all halves and groups
  static_assert(kSharedSteps == 0 || kGroups == 1);
  // Chains of sums, so that a product needn't wait for the one before: its latency is that of about 5.
  static constexpr int kScoreChains = kScoreM * kScoreN >= 5 ? 1 : kScoreM * kScoreN >= 3 ? 2 : 3;

  // Values: a warp has 64 of the 512 dimensions.
  static constexpr int kValueM = kLatent / 16 / kWarps;

  // Warps that copy KV: those without softmax, the last ones, 4 rows of KV each at a time.
  static constexpr int kLoaders = kWarps - kN8 < kTile / 4 ? kWarps - kN8 : kTile / 4;

  static constexpr int kScoreStride = kTile + 4;  // floats a row of partial scores
  static constexpr int kProbStride = kTile + 8;   // elements a row of P
  static constexpr int kStageBytes = kTile * kKeyDim * 2;
  static constexpr int kScoreBytes = kSlices * kRows * kScoreStride * 4;
  static constexpr int kProbBytes = kRows * kProbStride * 2;

  // Offsets in bytes. At the end the sums take the place of all but the table of rows.
  static constexpr int kScoresAt = kStages * kStageBytes;
  static constexpr int kProbsAt = kScoresAt + kScoreBytes;      // two
  static constexpr int kFactorsAt = kProbsAt + 2 * kProbBytes;  // two, a float a row
  static constexpr int kSlotsAt = kFactorsAt + 2 * kRows * 4;
  static constexpr int kSlotBytes = 2 * kThreads * 8;
  static constexpr int kPipelineBytes = kSlotsAt + kSlotBytes;
  static constexpr int kSumBytes = kRows * kLatent * 4;
  static constexpr int kRowsAt = kPipelineBytes > kSumBytes ? kPipelineBytes : kSumBytes;
  static constexpr int kLoadedAt = kRowsAt + kRows * int(sizeof(Row));  // an mbarrier a stage
  static constexpr int kScoresReadyAt = kLoadedAt + kStages * 8;        // an mbarrier
  static constexpr int kProbsReadyAt = kScoresReadyAt + 8;              // an mbarrier
  static constexpr int kMovedAt = kProbsReadyAt + 8;                    // the last tile that brought factors
  static constexpr int kQueriesAt = (kMovedAt + 8 + 15) / 16 * 16;      // [slice][lane][register]
  static constexpr int kSmemBytes = kQueriesAt + kSlices * 32 * kSharedQueryRegs * 4;

  static_assert(kRows % 8 == 0 && kRows <= kMaxRowTile);
  static_assert(kTile % 16 == 0 && kChunkUnit % kTile == 0 && kK16 % kHalves == 0);
  static_assert(kN8 <= kWarps, "a warp does the softmax of 8 rows");
};

// For the cards that give a block 99 KB: sm_86, sm_89, sm_120. Any other has more.
template <int kRows>
using Narrow = Shape<kRows, 16, 4>;
static_assert(Narrow<kMaxRowTile>::kSmemBytes <= 99 * 1024);

// For the 227 KB of sm_90: a step twice as long has half of the barriers, and the products read less of shared memory.
template <int kRows>
using Wide = Shape<kRows, 32, 4>;
static_assert(Wide<kMaxRowTile>::kSmemBytes <= 227 * 1024);

// Byte offset of 16-byte chunk c of row r in a KV stage. Rows are 1152 bytes apart, a multiple of the 128 bytes that
// span all banks, so chunks are permuted within their group of 8 by the row.
__device__ __forceinline__ uint32_t kv_offset(int r, int c) { return r * (kKeyDim * 2) + ((c ^ (r & 7)) << 4); }

}  // namespace tv::portable
