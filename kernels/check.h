// SPDX-License-Identifier: Apache-2.0
// What a debug build (apply.py build --debug) asks of the index arrays before every verify and every prep.
//
// A number out of its range is printed with its request and place, and stops the context: the next synchronisation
// fails. Other builds trust SGLang, and have none of this.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace tv {

#ifdef TV_DEBUG
cudaError_t check(const TvVerifyParams& p, void* stream);
cudaError_t check(const TvPrepParams& p, void* stream);
#else
inline cudaError_t check(const TvVerifyParams&, void*) { return cudaSuccess; }
inline cudaError_t check(const TvPrepParams&, void*) { return cudaSuccess; }
#endif

}  // namespace tv
