# SPDX-License-Identifier: Apache-2.0
"""Verify steps for kernels on an emulated block (tests/kernels/emulator), and what becomes of them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import random
from typing import Any

import torch
from treeverify.attention import abi, cases, plan, reference

LIMIT = 5e-3


def merged(case: cases.Case, library: ctypes.CDLL) -> torch.Tensor:
    """What the combine kernel makes of it, in float64: the output where a request has one split, else of its splits."""
    out, heads = case.out.double(), case.out.shape[1]
    splits = case.splits or case.bs * case.nsplit
    if plan.workspace_floats(case.bs, case.n, heads, splits) == 0:
        return out
    rows = case.n * heads
    parts = case.workspace[: splits * rows * plan.LATENT].view(splits, case.n, heads, plan.LATENT).double()
    lse = case.workspace[splits * rows * plan.LATENT :][: splits * rows].view(splits, case.n, heads, 1).double()
    tokens, shares = case.qo_indptr.tolist(), case.split_indptr
    for i in range(case.bs):
        b = i if shares is None else int(shares[case.bs + 1 + i])
        first, end = (i * case.nsplit, (i + 1) * case.nsplit) if shares is None else shares[i : i + 2].tolist()
        taper = case.taper if shares is None else 0
        active, width = library.tv_active_splits(case.kv_lens[b], end - first, taper), tokens[b + 1] - tokens[b]
        if active > 1:
            mine = slice(first, first + active), slice(width)
            assert not lse[mine].isnan().any(), "every active split leaves its log-sum-exp"
            weights = torch.softmax(lse[mine] * math.log(2), 0).nan_to_num(0)  # a row that sees nothing gives 0 / 0
            out[tokens[b] : tokens[b + 1]] = (weights * parts[mine]).sum(0)
    return out[: tokens[case.bs]]  # combine zeroes the others


def check(case: cases.Case, out: torch.Tensor) -> None:
    """Compares the rows of `out` [<= T, H, 512] with the reference."""
    if len(out):
        assert reference.worst_row_error(out, case.expected()[: len(out)]) <= LIMIT


def draw_case(seed: int, rows: int, dtype: torch.dtype) -> cases.Case:
    """Any layout, index width and mask form, one to some splits or a plan; up to three blocks of 40 rows."""
    draw = random.Random(f"{seed} {rows} {dtype}")
    n, heads = draw.choice([1, 2, 5, 9, 13]), draw.choice([1, 2, 3, 5, 8])
    two_source = draw.random() < 0.5
    planned = draw.random() < 0.3
    nsplit = draw.choice([1, 1, 2, 4])
    case = draw_step(
        [draw.choice([0, 1, 63, 64, draw.randrange(200)]) for _ in range(draw.randint(1, 2))],
        n,
        heads,
        dtype,
        seed=seed,
        mask_kind=draw.choice([abi.MASK_NONE, abi.MASK_PACKED, abi.MASK_FULL, abi.MASK_QLEN]),
        two_source=two_source,
        index_dtype=draw.choice([torch.int32, torch.int64]),
        qo_dtype=draw.choice([torch.int32, torch.int64]),
        nsplit=nsplit,
        taper=draw.randrange(nsplit),
        padded=0 if two_source else draw.randrange(2),
        extra_tokens=draw.randrange(3),
        logit_cap=draw.choice([0.0, 0.0, 3.0]),
    )
    case.q_nope.mul_(draw.choice([1, 1, 20]))  # a row's maximum then grows enough to scale what was summed before
    if case.mask_kind == abi.MASK_PACKED and case.mask is not None:
        case.mask |= -1 << n  # bits past the tree mean nothing
    return dataclasses.replace(case, splits=case.bs + draw.randrange(5)) if planned and not two_source else case


def draw_step(prefixes: list[int], n: int, heads: int, dtype: torch.dtype, **how: Any) -> cases.Case:
    """cases.make_case on the CPU with a pool of `dtype`."""
    return cases.make_case(prefixes, n, heads, device="cpu", **cases.pool_of(dtype), **how)
