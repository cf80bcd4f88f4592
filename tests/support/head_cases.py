# SPDX-License-Identifier: Apache-2.0
"""Logits that are hard to rank, and how close log-probabilities must come."""

from __future__ import annotations

import math

import torch
from treeverify.ddtree import head_ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = "normal peaked ties few equal rising falling zeros masked hidden deep inf nan".split()


def logits(kind: str, rows: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, vocab] on the CPU.

    Normal and peaked ones; a few tied or most of them; all equal; sorted either way; both zeros; a tenth, or all but a
    few, at -inf; half at -1000, the others, whole lists, at -inf; some at +inf; some NaN of either sign.
    """
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=gen) * 3
    chance = torch.rand(rows, vocab, generator=gen)
    if kind == "peaked":
        x = x.pow(3)
    elif kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "few":
        x = (chance > 0.5).float() + (chance > 0.999).float()
    elif kind == "equal":
        x = torch.full_like(x, -1.5)
    elif kind in ("rising", "falling"):
        x = x.sort(dim=1, descending=kind == "falling").values
    elif kind == "zeros":
        x = torch.where(chance > 0.5, 0.0, -0.0)
    elif kind == "masked":
        x[chance < 0.1] = -torch.inf
    elif kind == "hidden":
        x[chance < 0.999] = -torch.inf
        x[-1] = -torch.inf
    elif kind == "deep":
        x -= 1000
        x[:, vocab // 2 + 1 :] = -torch.inf
    elif kind == "inf":
        x[chance > 0.999] = torch.inf
    elif kind == "nan":
        x[chance > 0.999] = torch.nan
        x[chance < 0.001] = -torch.nan
    return x.to(dtype)


def empty_lists(rows: int, count: int, k: int, device: str = "cpu") -> torch.Tensor:
    """int64 [rows, count, k + 1], poisoned."""
    return torch.full((rows, count, k + 1), -7, dtype=torch.int64, device=device)


def empty_result(rows: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """ids and logprobs, poisoned."""
    return torch.full((rows, k), -7, device=device), torch.full((rows, k), 7.0, device=device)


def topk(x: torch.Tensor, k: int, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and logprobs of the rows of x, by both ops on its device."""
    lists = empty_lists(x.shape[0], head_ops.list_count(x.shape[1]), k, str(x.device))
    head_ops.topk_lists(x, first_id, lists)
    result = empty_result(x.shape[0], k, str(x.device))
    head_ops.topk_merge(lists[None], *result)
    return result


def check_lists(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Candidates are the same; sums are within 1e-5 of each other, or both not finite.

    A sum of 8192 positive terms, 32 of them one after the other and then in a tree of 13 levels, each off by 2**-22:
    45 * 2**-24 + 2**-22 is 3e-6.
    """
    assert torch.equal(found[..., :-1], expected[..., :-1])
    sums = [lists[..., -1].cpu().int().view(torch.float32) for lists in (found, expected)]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=0, equal_nan=True)


def check_logprobs(found: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    """Within 1e-5, the error of the sum, and a few roundings at the size of the logits `x`."""
    finite = x[x.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    atol = 1e-5 + 4 * math.ldexp(largest + math.log(x.shape[1]), -24)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, equal_nan=True)
