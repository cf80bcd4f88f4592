# SPDX-License-Identifier: Apache-2.0
"""attention/abi.py mirrors kernels/params.h."""

from __future__ import annotations

import pytest
from treeverify.attention import abi


@pytest.mark.parametrize(
    ("mirror", "name"),
    [
        (abi.VerifyParams, "TvVerifyParams"),
        (abi.PrepParams, "TvPrepParams"),
        (abi.PlanParams, "TvPlanParams"),
    ],
)
def test_struct_layout(same_layout, mirror, name):
    same_layout("params.h", name, mirror)


def test_mask_kinds(host_build):
    names = "TV_MASK_NONE, TV_MASK_PACKED, TV_MASK_FULL, TV_MASK_QLEN"
    source = f'#include "params.h"\nextern "C" int kind(int i) {{ const int k[] = {{{names}}}; return k[i]; }}'
    lib = host_build("kinds", source)
    assert [lib.kind(i) for i in range(4)] == [abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN]


def test_paths(host_build):
    names = "TV_PATH_AUTO, TV_PATH_PORTABLE, TV_PATH_HOPPER, TV_PATH_NARROW, TV_FEW_ROWS"
    source = f'#include "params.h"\nextern "C" int path(int i) {{ const int p[] = {{{names}}}; return p[i]; }}'
    lib = host_build("paths", source)
    mirror = [abi.PATH_AUTO, abi.PATH_PORTABLE, abi.PATH_HOPPER, abi.PATH_NARROW, abi.FEW_ROWS]
    assert [lib.path(i) for i in range(5)] == mirror


def test_dtypes(host_build):
    names = "TV_BF16, TV_FP16, TV_FP8_E4M3, TV_FP8_E5M2"
    source = f'#include "params.h"\nextern "C" int dtype(int i) {{ const int d[] = {{{names}}}; return d[i]; }}'
    lib = host_build("dtypes", source)
    assert [lib.dtype(i) for i in range(4)] == [abi.BF16, abi.FP16, abi.FP8_E4M3, abi.FP8_E5M2]


def test_missing_library_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEVERIFY_LIBRARY", str(tmp_path / "none.so"))
    abi.library.cache_clear()
    with pytest.raises(RuntimeError, match=r"none\.so.*apply\.py apply"):
        abi.library()
    abi.library.cache_clear()
