# SPDX-License-Identifier: Apache-2.0
"""ddtree/head_abi.py mirrors kernels/head/params.h, and the ops' limits are the kernels'."""

from __future__ import annotations

import pytest
import torch
from treeverify.ddtree import head_abi, head_ops


@pytest.mark.parametrize(
    ("mirror", "name"), [(head_abi.ListsParams, "TvTopkListsParams"), (head_abi.MergeParams, "TvTopkMergeParams")]
)
def test_struct_layout(same_layout, mirror, name):
    same_layout("head/params.h", name, mirror)


def test_limits(host_build):
    names = "tv::head::kSlice, tv::head::kMaxTopK, tv::head::kMaxMerged"
    dtypes = "TV_LOGITS_BF16, TV_LOGITS_FP16, TV_LOGITS_FP32"
    source = f"""
    #include "head/keys.h"
    #include "head/params.h"
    extern "C" int limit(int i) {{ const int k[] = {{{names}, {dtypes}}}; return k[i]; }}
    """
    lib = host_build("limits", source)
    mirror = [head_abi.SLICE, head_abi.MAX_K, head_abi.MAX_MERGED]
    mirror += [head_ops.DTYPES[t] for t in (torch.bfloat16, torch.float16, torch.float32)]
    assert [lib.limit(i) for i in range(6)] == mirror
