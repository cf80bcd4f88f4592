# SPDX-License-Identifier: Apache-2.0
"""What counts as a tree; no SGLang needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from treeverify import gates


@pytest.mark.parametrize(
    "algorithm, topk, trees",
    [
        ("EAGLE", 1, False),
        ("EAGLE3", 2, True),
        ("DFLASH", None, False),
        ("NGRAM", 1, True),
        ("SOMEONES_PLUGIN", 1, True),
    ],
)
def test_an_unknown_algorithm_is_taken_to_draft_trees(algorithm: str, topk: int | None, trees: bool) -> None:
    args = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=topk)
    assert gates.drafts_trees(args) is trees
