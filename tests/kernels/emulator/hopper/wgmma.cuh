// SPDX-License-Identifier: Apache-2.0
// Takes the place of kernels/hopper/wgmma.cuh. Products take place as late as they may: when they are waited for.
#pragma once

#include <vector>

#include "cuda_cpp.h"

namespace tv::hopper {

inline uint64_t descriptor(uint32_t addr) { return addr; }

// A warp's quarter of a product: 16 rows of a, all of b.
struct Product {
  float left[16][16];
  uint32_t b;
  int columns;
  bool more;
  float (*d[32])[4];  // of each lane
};
inline std::vector<std::vector<Product>> groups[emulator::kWarps];  // of products, in flight; the last one is open

inline void run(const Product& x) {
  for (int n = 0; n < x.columns; ++n) {
    float right[16];
    for (int k = 0; k < 16; ++k) {
      uint32_t at = x.b + n / 8 * 1024 + n % 8 * 128 + 2 * k;
      at ^= (at >> 7 & 7) << 4;
      __half h;
      memcpy(&h, emulator::shared(at, 2), 2);
      right[k] = __half2float(h);
    }
    for (int row = 0; row < 16; ++row) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += x.left[row][k] * right[k];
      float& to = x.d[row % 8 * 4 + n % 8 / 2][n / 8][row / 8 * 2 + n % 2];
      to = x.more ? to + sum : sum;
    }
  }
}

inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() {
  emulator::together("wgmma.commit", nullptr,
                     [](void**) { groups[emulator::block.running->thread / 32].emplace_back(); });
}
template <int kPending>
void wgmma_wait() {
  emulator::together("wgmma.wait", nullptr, [](void**) {
    auto& all = groups[emulator::block.running->thread / 32];
    while (all.size() > kPending + 1) {
      for (const Product& x : all.front()) run(x);
      all.erase(all.begin());
    }
  });
}

}  // namespace tv::hopper
