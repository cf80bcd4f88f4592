// SPDX-License-Identifier: Apache-2.0
// What the host needs to know about a kernel to launch and to report it.
#pragma once

namespace tv {

struct Kernel {
  const char* name;
  const void* function;
  int dynamic_smem_bytes;
  int threads;
};

}  // namespace tv
