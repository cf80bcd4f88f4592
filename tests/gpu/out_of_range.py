# SPDX-License-Identifier: Apache-2.0
"""One verify step with an index out of its range, on the library that $TREEVERIFY_LIBRARY names; a process of its own,
for the check ends its CUDA context.

    python tests/gpu/out_of_range.py none|slot|draft|row [captured]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay" / "srt"))

import torch  # noqa: E402
from treeverify.attention import abi, cases, ops, plan, reference  # noqa: E402


class Prep:
    """Two requests on rows of three, and a padded one with stale numbers."""

    def __init__(self) -> None:
        self.rows = torch.tensor([0, 2, 1 << 40], device="cuda")
        self._lens = torch.tensor([5, 9, -3], dtype=torch.int32, device="cuda")
        self._table = torch.zeros(3, 32, dtype=torch.int32, device="cuda")
        sizes = ((4, torch.int32), (96, torch.int32), (3 * 4 * plan.mask_words(4), torch.int64))
        self._out = [torch.zeros(size, dtype=dtype, device="cuda") for size, dtype in sizes]

    def run(self) -> None:
        ops.mla_prep(self._table, self.rows, self._lens, None, abi.MASK_NONE, 2, 3, 4, *self._out)


def main(wrong: str, captured: bool) -> None:
    case, prep = cases.make_case([300, 0, 777], 9, 8, two_source=wrong == "draft"), Prep()
    expected = case.expected()

    def both() -> None:
        prep.run()
        case.run()

    run = both
    run()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    if wrong == "slot":
        case.kv_indices[300 + 9 + 9 + 100] = case.pool.shape[0]
    elif wrong == "draft":
        assert case.out_cache_loc is not None
        case.out_cache_loc[9 + 4] = -1
    elif wrong == "row":
        prep.rows[1] = 3
    run()
    torch.cuda.synchronize()
    assert wrong == "none" and reference.worst_row_error(case.out, expected) <= 5e-3
    print("went through")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["captured"])
