// SPDX-License-Identifier: Apache-2.0
// What the host needs to know of the portable path to choose a kernel and size the grid.
#pragma once

namespace tv::portable {

constexpr int kMaxRowTile = 48;  // query rows (token, head) a block holds; there is a kernel for every multiple of 8

}  // namespace tv::portable
