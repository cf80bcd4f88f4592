# SPDX-License-Identifier: Apache-2.0
"""A few small verify steps through every kernel; run under compute-sanitizer by test_sanitizer.py."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "tests" / "support")]

import kv_cases  # noqa: E402
import tree_cases  # noqa: E402
from treeverify.attention import abi, cases, ops, paths  # noqa: E402
from treeverify.ddtree import head_ops  # noqa: E402
from treeverify.ddtree import ops as tree_ops  # noqa: E402
from treeverify.kv import ops as kv_ops  # noqa: E402

WIDTHS = [(n, 8) for n in range(1, 10)] + [(13, 8)]
"""Draft tokens and heads: every row tile of both paths, and more rows than any holds."""


def verify_steps(path: int) -> None:
    padding = {"padded": 2, "extra_tokens": 3}
    for n, heads in WIDTHS:
        bf16: dict[str, Any] = {"dtype": torch.bfloat16, "path": path}
        fp16: dict[str, Any] = {"dtype": torch.float16, "path": path}
        cases.make_case([0, 150], n, heads, nsplit=1, two_source=True, mask_kind=abi.MASK_QLEN, **bf16).run()
        cases.make_case([0, 150], n, heads, nsplit=1, mask_kind=abi.MASK_FULL, **padding, **fp16).run()
        cases.make_case([0, 150], n, heads, nsplit=3, **padding, **fp16).run()
        cases.make_case([0, 300], n, heads, plan=True, **padding, **bf16).run()
    for pool in paths.FP8:
        if path in {target.path for target in paths.testable(torch.device("cuda"), pool)}:
            fp8_steps(path, pool)
    for nsplit in (6, 12, 20):  # combine shares a row among 2, 4 and 8 warps
        cases.make_case([1500, 70], 3, 8, nsplit=nsplit, path=path).run()


def fp8_steps(path: int, pool: torch.dtype) -> None:
    for n, heads in WIDTHS:
        fp8: dict[str, Any] = {"path": path, **cases.pool_of(pool)}
        cases.make_case([0, 300], n, heads, nsplit=1, two_source=True, extra_tokens=3, **fp8).run()
        cases.make_case([0, 900], n, heads, nsplit=3, padded=2, **fp8).run()


def prep_steps() -> None:
    mask = torch.ones(5 * (40 + 5), dtype=torch.bool, device="cuda")
    table = torch.arange(90, dtype=torch.int32, device="cuda").view(2, 45)
    indptr, indices = (
        torch.zeros(4, dtype=torch.int32, device="cuda"),
        torch.zeros(45, dtype=torch.int32, device="cuda"),
    )
    lens, rows = torch.tensor([40], device="cuda"), torch.tensor([1, 2**40, 0], device="cuda")
    packed = torch.zeros(15, dtype=torch.int64, device="cuda")
    ops.mla_prep(table, rows, lens, mask, abi.MASK_FULL, 1, 3, 5, indptr, indices, packed)
    ops.mla_prep(table, rows, lens, None, abi.MASK_NONE, 1, 3, 0, indptr, indices, packed)
    ops.mla_prep(table, rows, lens, packed[:5].clone(), abi.MASK_PACKED, 1, 3, 5, indptr, indices, packed)


def tree_steps() -> None:
    for kind, ranks, n in (("halves", 15, 16), ("random", 63, 64), ("halves", 80, 130), ("nan", 3, 40)):
        tree = tree_cases.build_args(tree_cases.logprobs(kind, 3, 7, ranks), n, device="cuda")
        tree_ops.tree_build(*tree)
        tree_ops.tree_walk(*tree_cases.walk_args(tree))


def head_steps() -> None:
    """Vectors that end with the vocabulary or past it, ties beyond what is ranked, k beyond a slice's logits."""
    for dtype in head_ops.DTYPES:
        for vocab, k in ((9_000, 63), (9_001, 255), (8_200, 15)):
            logits = torch.randn(3, vocab, device="cuda").to(dtype)
            logits[1] = 1
            lists = torch.zeros(3, 2, k + 1, dtype=torch.int64, device="cuda")
            head_ops.topk_lists(logits, 0, lists)
            result = torch.zeros(3, k, dtype=torch.int64, device="cuda"), torch.zeros(3, k, device="cuda")
            head_ops.topk_merge(lists[None], *result)


def kv_moves() -> None:
    """Groups that fill a block and that don't, rows that need several blocks, slots outside."""
    draw = random.Random(0)
    moves = [
        (kv_cases.paths(draw, 3, 40, 7, 200), 7), (kv_cases.rings(draw, 2, 90, 200), 90),
        (kv_cases.apart(draw, 90, 200), 0), ([(-1, 2), (3, 1 << 40), (5, 200), (6, 7)], 0),
    ]  # fmt: skip
    for listed, group in moves:
        for index in (torch.int32, torch.int64) if listed[1][1] < 1 << 31 else (torch.int64,):
            one = kv_cases.case(0, [1152, 576, 2048, 40016], 200, listed, group=group, index=index, device="cuda")
            kv_ops.kv_move(*one.args())


if __name__ == "__main__":
    for target in paths.testable(torch.device("cuda")):
        verify_steps(target.path)
    prep_steps()
    tree_steps()
    head_steps()
    kv_moves()
    torch.cuda.synchronize()
    print("small steps: done")
