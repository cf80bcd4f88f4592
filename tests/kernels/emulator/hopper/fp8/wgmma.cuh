// SPDX-License-Identifier: Apache-2.0
// Takes the place of kernels/hopper/fp8/wgmma.cuh.
#pragma once

#include "hopper/wgmma.cuh"

namespace tv::hopper::fp8 {

template <int kN>
struct WgmmaFragment {
  static void run(float (&d)[kN / 8][4], const uint32_t* a, uint64_t b, bool more) {
    struct Lane {
      float (*d)[4];
      const uint32_t* a;
      uint64_t b;
      bool more;
    } mine{d, a, b, more};
    emulator::together("wgmma", &mine, [](void** lanes) {
      Product x;
      const Lane& first = *static_cast<Lane*>(lanes[0]);
      x.b = uint32_t(first.b), x.columns = kN, x.more = first.more;
      for (int i = 0; i < 32; ++i) {
        const Lane& lane = *static_cast<Lane*>(lanes[i]);
        if (lane.b != first.b || lane.more != first.more) emulator::fail("wgmma: lanes differ");
        x.d[i] = lane.d;
        for (int r = 0; r < 4; ++r) {
          const float2 pair = __half22float2(same_bits<__half2>(lane.a[r]));
          float* to = x.left[i / 4 + r % 2 * 8] + 2 * (i % 4) + r / 2 * 8;
          to[0] = pair.x, to[1] = pair.y;
        }
      }
      auto& all = groups[emulator::block.running->thread / 32];
      if (all.empty()) all.emplace_back();
      all.back().push_back(x);
    });
  }
};

}  // namespace tv::hopper::fp8
