// SPDX-License-Identifier: Apache-2.0
// How a block of 8 warps cuts up its work, and where things lie in its shared memory.
#pragma once

#include <type_traits>

#include "index.h"
#include "portable/limits.h"
#include "portable/pool.cuh"

namespace tv::portable {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// What a block keeps of a row outside of registers.
struct Row {
  int64_t out;    // where it lies in the output, in elements
  int node;       // its token, counted within the request
  float inverse;  // of the sum of its softmax, at the end
};

// tileRows query rows by tilePositions KV positions a step, `stages` KV tiles in shared memory, as the pool holds them.
template <int tileRows, int tilePositions, int stages, typename pool>
struct Shape {
  using Pool = pool;
  static constexpr int kRows = tileRows;
  static constexpr int kTile = tilePositions;
  static constexpr int kStages = stages;
  static constexpr int kN8 = kRows / 8;    // a product instruction takes 8 rows
  static constexpr int kK16 = kTile / 16;  // and 16 positions

  // Scores: 4 slices of the key dimension. A warp has one slice, and half of the positions or half of the rows. Slice w
  // takes dimensions 16 w .. 16 w + 15 of every 64: where those lie in a swizzled row does not depend on which 64.
  static constexpr int kSlices = 4;
  static constexpr int kSteps = kKeyDim / (16 * kSlices);
  static constexpr int kHalves = kTile > 16 ? 2 : 1;          // of the positions; where there are two, K is read once
  static constexpr int kGroups = kWarps / kSlices / kHalves;  // of the rows
  static constexpr int kScoreM = kK16 / kHalves;
  static constexpr int kScoreN = (kN8 + kGroups - 1) / kGroups;
  // Steps whose part of Q stays in shared memory, for want of registers: the last ones.
  static constexpr int kSharedSteps = kHalves == 2 && kRows > 40 ? 1 : 0;
  static constexpr int kSharedQueryRegs = 2 * kSharedSteps * kScoreN;  // of a lane
  static_assert(kSharedSteps == 0 || kGroups == 1);
  // It is the same in both halves of the positions: they share it where a barrier comes between writing and reading.
  static constexpr int kQueryCopies = Pool::kFp8 ? kHalves : 1;
  // Chains of sums, so that a product needn't wait for the one before: its latency is that of about 5.
  static constexpr int kScoreChains = kScoreM * kScoreN >= 5 ? 1 : kScoreM * kScoreN >= 3 ? 2 : 3;

  // Values: a warp has 64 of the 512 dimensions.
  static constexpr int kValueM = kLatent / 16 / kWarps;

  // Warps that copy KV: those without softmax, the last ones, each so many rows of KV at a time that 9 copies of 16
  // bytes a lane bring them.
  static constexpr int kRowBytes = kKeyDim * sizeof(typename Pool::Element);
  static constexpr int kRowsAtOnce = 9 * 32 * 16 / kRowBytes;
  static constexpr int kLoaders = kWarps - kN8 < kTile / kRowsAtOnce ? kWarps - kN8 : kTile / kRowsAtOnce;

  static constexpr int kScoreStride = kTile + 4;  // floats a row of partial scores
  static constexpr int kProbStride = kTile + 8;   // elements a row of P
  static constexpr int kStageBytes = kTile * kRowBytes;
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
  static constexpr int kQueriesAt = (kMovedAt + 8 + 15) / 16 * 16;      // [copy][slice][lane][register]
  static constexpr int kSmemBytes = kQueriesAt + kQueryCopies * kSlices * 32 * kSharedQueryRegs * 4;

  static_assert(kRows % 8 == 0 && kRows <= kMaxRowTile);
  static_assert(kTile % 16 == 0 && kChunkUnit % kTile == 0 && kK16 % kHalves == 0);
  static_assert(kN8 <= kWarps, "a warp does the softmax of 8 rows");

  // Byte offset of 16-byte chunk c of row r in a KV stage, such that the same chunk of 8 rows lies in all banks, which
  // 128 bytes span. Rows of 1152 bytes are a multiple of that: chunks are permuted within their group of 8 by the row.
  // Of rows of 576 bytes every second one is half of it further: two of them share a permutation, of a group of 4.
  __device__ __forceinline__ static uint32_t kv_offset(int r, int c) {
    return r * kRowBytes + ((c ^ (Pool::kFp8 ? r >> 1 & 3 : r & 7)) << 4);
  }
};

// For the cards that give a block 99 KB: sm_86, sm_89, sm_120. Any other has more. Where the pool is fp8, twice as many
// positions are as many bytes: a step twice as long has half of the barriers. It needs four stages, which few rows
// leave room for: with three, 32 rows are slower than with eight of the shorter steps.
template <int kRows, typename Pool = AsQuery>
using Narrow = std::conditional_t<Pool::kFp8 && kRows <= 24, Shape<kRows, 32, 4, Pool>,
                                  Shape<kRows, 16, 8 / sizeof(typename Pool::Element), Pool>>;
static_assert(Narrow<kMaxRowTile>::kSmemBytes <= 99 * 1024);
static_assert(Narrow<24, E4M3>::kSmemBytes <= 99 * 1024 && Narrow<kMaxRowTile, E4M3>::kSmemBytes <= 99 * 1024);

// For the 227 KB of sm_90: twice as many positions a step again, as far as registers reach; the products read less of
// shared memory.
template <int kRows, typename Pool = AsQuery>
using Wide = std::conditional_t<Pool::kFp8 && kRows <= 32, Shape<kRows, 64, 4, Pool>,
                                Shape<kRows, 32, 8 / sizeof(typename Pool::Element), Pool>>;
static_assert(Wide<kMaxRowTile>::kSmemBytes <= 227 * 1024);
static_assert(Wide<32, E4M3>::kSmemBytes <= 227 * 1024 && Wide<kMaxRowTile, E4M3>::kSmemBytes <= 227 * 1024);

}  // namespace tv::portable
