// SPDX-License-Identifier: Apache-2.0
// What the host needs to know about a kernel to launch and to report it.
#pragma once

namespace tv {

struct Kernel {
  const char* name;
  const void* function;  // null where the library has no machine code of it (a unit compiled with TV_HOST_ONLY)
  int dynamic_smem_bytes;
  int threads;
};

}  // namespace tv
