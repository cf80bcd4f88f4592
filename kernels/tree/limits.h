// SPDX-License-Identifier: Apache-2.0
// What the tree kernels are made for.
#pragma once

namespace tv::tree {

constexpr int kThreads = 256;   // of a block, which serves one request
constexpr int kMaxNodes = 256;  // with the root
constexpr int kMaxLevels = 255;
constexpr int kMaxRanks = 255;

}  // namespace tv::tree
