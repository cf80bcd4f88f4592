# SPDX-License-Identifier: Apache-2.0
"""How many candidates a drafted position has."""

from __future__ import annotations

import os

TOPK = "TREEVERIFY_DDTREE_TOPK"
"""Candidates a position; the budget where unset. 1 drafts the chain that DFLASH drafts."""


def topk(budget: int, vocabulary: int) -> int:
    """Candidates a position: no more than the budget can matter (arXiv 2604.12989, lemma 1).

    Raises:
        ValueError: the environment asks for none.
    """
    wanted = os.environ.get(TOPK, "")
    if wanted and (not wanted.isdigit() or int(wanted) < 1):
        raise ValueError(f"treeverify: {TOPK} is {wanted!r}, expected a number of candidates from 1, or nothing")
    return min(int(wanted) if wanted else budget, budget, vocabulary)
