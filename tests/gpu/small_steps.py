# SPDX-License-Identifier: Apache-2.0
"""A few small verify steps through every kernel; run under compute-sanitizer by test_sanitizer.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "overlay" / "srt"))

from treeverify.attention import abi, cases, ops  # noqa: E402

WIDTHS = [(1, 3), (2, 8), (3, 8), (4, 8), (5, 8), (9, 8)]  # draft tokens, heads: every row tile


def verify_steps() -> None:
    for n, heads in WIDTHS:
        for dtype in (torch.bfloat16, torch.float16):
            cases.make_case([0, 150], n, heads, dtype=dtype, nsplit=1, two_source=True, mask_kind=abi.MASK_QLEN).run()
            padding = {"padded": 2, "extra_tokens": 3}
            cases.make_case([0, 150], n, heads, dtype=dtype, nsplit=1, mask_kind=abi.MASK_FULL, **padding).run()
            cases.make_case([0, 150], n, heads, dtype=dtype, nsplit=3, **padding).run()


def prep_step() -> None:
    mask = torch.ones(5 * (40 + 5), dtype=torch.bool, device="cuda")
    table = torch.arange(90, dtype=torch.int32, device="cuda").view(2, 45)
    indptr, indices = (
        torch.zeros(4, dtype=torch.int32, device="cuda"),
        torch.zeros(45, dtype=torch.int32, device="cuda"),
    )
    lens, rows = torch.tensor([40], device="cuda"), torch.tensor([1, 2**40, 0], device="cuda")
    packed = torch.zeros(15, dtype=torch.int64, device="cuda")
    ops.mla_prep(table, rows, lens, mask, abi.MASK_FULL, 1, 3, 5, indptr, indices, packed)


if __name__ == "__main__":
    verify_steps()
    prep_step()
    torch.cuda.synchronize()
    print("small steps: done")
