# SPDX-License-Identifier: Apache-2.0
"""ddtree/abi.py mirrors kernels/tree/params.h, and the ops' limits are the kernels'."""

from __future__ import annotations

import pytest
from treeverify.attention.plan import MAX_Q
from treeverify.ddtree import abi, reference


@pytest.mark.parametrize(("mirror", "name"), [(abi.TreeParams, "TvTreeParams"), (abi.WalkParams, "TvWalkParams")])
def test_struct_layout(same_layout, mirror, name):
    same_layout("tree/params.h", name, mirror)


def test_limits(host_build):
    names = "tv::tree::kMaxNodes, tv::tree::kMaxLevels, tv::tree::kMaxRanks"
    source = f'#include "tree/limits.h"\nextern "C" int limit(int i) {{ const int k[] = {{{names}}}; return k[i]; }}'
    lib = host_build("limits", source)
    assert [lib.limit(i) for i in range(3)] == [MAX_Q, reference.MAX_LEVELS, reference.MAX_RANKS]
