// SPDX-License-Identifier: Apache-2.0
// mla_prep by torch's dispatcher to C++: a bucket's struct kept (its address is `params`), a step's tensors checked here.
#include <torch/library.h>

#include "prep.h"

namespace {

Given given(const at::Tensor& t) {
  return {t.data_ptr(), t.numel(), int(t.element_size()), at::isIntegralType(t.scalar_type(), false),
          t.is_contiguous()};
}

void prep(int64_t params, const at::Tensor& rows, const at::Tensor& lens, const std::optional<at::Tensor>& mask,
          int64_t kind, int64_t raw_bs) {
  const Given m = mask ? given(*mask) : Given{};
  auto* p = reinterpret_cast<TvPrepParams*>(params);
  const char* wrong = prep_step(p, given(rows), given(lens), mask ? &m : nullptr, kind, raw_bs);
  TORCH_CHECK(wrong == nullptr, wrong);
}

}  // namespace

TORCH_LIBRARY(treeverify_bench_cpp, m) {
  m.def("mla_prep(int params, Tensor rows, Tensor lens, Tensor? mask, int kind, int raw_bs) -> ()");
  m.impl("mla_prep", c10::DispatchKey::CPU, &prep);
}
