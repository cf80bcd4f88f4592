# SPDX-License-Identifier: Apache-2.0
"""A few small verify steps through every kernel; run under compute-sanitizer by test_sanitizer.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay" / "srt"))

from treeverify.attention import abi, cases, ops


def main() -> None:
    for n, heads in [(1, 3), (2, 8), (3, 8), (4, 8), (5, 8), (9, 8)]:  # every row tile
        for dtype in (torch.bfloat16, torch.float16):
            for nsplit, two_source, kind in [(1, True, abi.MASK_QLEN), (3, False, abi.MASK_PACKED)]:
                case = cases.make_case(
                    [0, 150], n, heads, dtype=dtype, nsplit=nsplit, two_source=two_source, mask_kind=kind
                )
                case.run()
    mask = torch.ones(5 * (40 + 5), dtype=torch.bool, device="cuda")
    table = torch.arange(90, dtype=torch.int32, device="cuda").view(2, 45)
    out = [torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(45, dtype=torch.int32, device="cuda")]
    lens, rows = torch.tensor([40], device="cuda"), torch.tensor([1, 2**40, 0], device="cuda")
    ops.mla_prep(
        table, rows, lens, mask, abi.MASK_FULL, 1, 3, 5, *out, torch.zeros(15, dtype=torch.int64, device="cuda")
    )
    torch.cuda.synchronize()
    print("small steps: done")


if __name__ == "__main__":
    main()
