// SPDX-License-Identifier: Apache-2.0
// How much of a move a block does at a time. Columns of a row are independent of each other: a block takes some columns
// of a whole group.
#pragma once

#include "index.h"

namespace tv::kv {

constexpr int kThreads = 256;
constexpr int kHeld = 8;         // pieces that a thread has in registers
constexpr int kPieceBytes = 16;  // what it loads and stores at once
constexpr int kMaxGroup = 256;   // entries
constexpr int kMaxBlocks = 1 << 14;

struct Cut {
  int rows;    // entries of a tile: a group, or as many of their own as a block holds
  int width;   // pieces of a row
  int across;  // tiles that make up the rows
};

TV_HD Cut cut(int64_t row_bytes, int group) {
  const int pieces = int(row_bytes / kPieceBytes), held = kThreads * kHeld, most = group ? held / group : held;
  const int width = pieces < most ? pieces : most, fit = held / width;
  return {group ? group : fit < kMaxGroup ? fit : kMaxGroup, width, ceil_div(pieces, width)};
}

}  // namespace tv::kv
