// SPDX-License-Identifier: Apache-2.0
// mla_prep by apache-tvm-ffi: a bucket's struct kept (its address is `params`), a step's tensors checked here.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "prep.h"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

Given given(const TensorView& t) {
  const DLDataType type = t.dtype();
  return {t.data_ptr(), t.numel(), type.bits / 8, type.code == kDLInt || type.code == kDLUInt, t.IsContiguous()};
}

void prep(int64_t params, TensorView rows, TensorView lens, Optional<TensorView> mask, int64_t kind, int64_t raw_bs) {
  const Given m = mask ? given(*mask) : Given{};
  auto* p = reinterpret_cast<TvPrepParams*>(params);
  const char* wrong = prep_step(p, given(rows), given(lens), mask ? &m : nullptr, kind, raw_bs);
  if (wrong) TVM_FFI_THROW(ValueError) << wrong;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(mla_prep, prep);
