// SPDX-License-Identifier: Apache-2.0
// ldmatrix and stmatrix.
#pragma once

#include <array>

#include "machine.h"

namespace emulator {

// kCount matrices of 8 x 8 elements; lanes 8 i .. 8 i + 7 bring the addresses of the rows of matrix i.
template <int kCount>
void ldmatrix(const char* what, bool transposed, uint32_t (&r)[kCount], uint32_t addr) {
  struct Lane {
    uint32_t addr;
    uint32_t* r;
  } mine{addr, r};
  together(what, &mine, [=](void** lanes) {
    for (int i = 0; i < kCount; ++i) {
      uint16_t m[8][8];
      for (int row = 0; row < 8; ++row) {
        memcpy(m[row], shared(static_cast<Lane*>(lanes[8 * i + row])->addr, 16), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, col = 2 * (lane % 4);
        const uint32_t low = transposed ? m[col][row] : m[row][col];
        const uint32_t high = transposed ? m[col + 1][row] : m[row][col + 1];
        static_cast<Lane*>(lanes[lane])->r[i] = low | high << 16;
      }
    }
  });
}
// The lanes' parts of kCount matrices, transposed on their way to shared memory.
template <int kCount>
void stmatrix_trans(const char* what, uint32_t addr, std::array<uint32_t, kCount> r) {
  struct Lane {
    uint32_t addr;
    const uint32_t* r;
  } mine{addr, r.data()};
  together(what, &mine, [](void** lanes) {
    for (int i = 0; i < kCount; ++i) {
      for (int lane = 0; lane < 32; ++lane) {
        const uint32_t pair = static_cast<Lane*>(lanes[lane])->r[i];
        for (int k = 0; k < 2; ++k) {
          const uint32_t row = static_cast<Lane*>(lanes[8 * i + 2 * (lane % 4) + k])->addr;
          const uint16_t element = uint16_t(pair >> 16 * k);
          memcpy(shared(row, 16) + lane / 4 * 2, &element, 2);
        }
      }
    }
  });
}

}  // namespace emulator
