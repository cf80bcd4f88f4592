# SPDX-License-Identifier: Apache-2.0
"""ddtree/abi.py mirrors kernels/tree/params.h, and the ops' limits are the kernels'."""

from __future__ import annotations

import ctypes

import pytest
from treeverify.attention.plan import MAX_Q
from treeverify.ddtree import abi, reference


@pytest.mark.parametrize(("mirror", "name"), [(abi.TreeParams, "TvTreeParams"), (abi.WalkParams, "TvWalkParams")])
def test_struct_layout(host_build, mirror, name):
    fields = [f[0] for f in mirror._fields_]
    rows = ", ".join(f"{{offsetof({name}, {f}), sizeof({name}::{f})}}" for f in fields)
    source = f"""
    #include <stddef.h>
    #include "tree/params.h"
    static const size_t rows[][2] = {{{rows}}};
    extern "C" size_t total() {{ return sizeof({name}); }}
    extern "C" size_t at(int i, int what) {{ return rows[i][what]; }}
    """
    lib = host_build(name, source)
    lib.total.restype = lib.at.restype = ctypes.c_size_t
    for i, field in enumerate(fields):
        found = getattr(mirror, field)
        assert (found.offset, found.size) == (lib.at(i, 0), lib.at(i, 1)), field
    assert ctypes.sizeof(mirror) == lib.total()


def test_limits(host_build):
    names = "tv::tree::kMaxNodes, tv::tree::kMaxLevels, tv::tree::kMaxRanks"
    source = f'#include "tree/limits.h"\nextern "C" int limit(int i) {{ const int k[] = {{{names}}}; return k[i]; }}'
    lib = host_build("limits", source)
    assert [lib.limit(i) for i in range(3)] == [MAX_Q, reference.MAX_LEVELS, reference.MAX_RANKS]
