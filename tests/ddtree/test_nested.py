# SPDX-License-Identifier: Apache-2.0
"""Trees of one step are nested: what a smaller budget would have built, and what the target would have taken of it."""

from __future__ import annotations

import pytest
import torch
from tree_cases import KINDS, build_args, logprobs, walk_args
from treeverify.ddtree import ops
from treeverify.ddtree.tree import Candidates, DraftTree

WIDE = 40


def built(kind: str, n: int) -> DraftTree:
    args = build_args(logprobs(kind, 5, 7, 39), WIDE)
    return DraftTree.build(Candidates(args.topk_ids, args.topk_logprobs), args.root, args.prefix_lens, n)


@pytest.mark.parametrize("n", [1, 2, 8, 16, 39, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_nodes_are_the_smaller_tree(kind, n):
    wide, narrow = built(kind, WIDE), built(kind, n)
    for name in ("tokens", "positions", "parents", "depths", "scores"):
        assert torch.equal(getattr(narrow, name), getattr(wide, name)[:, :n]), name
    assert torch.equal(narrow.visible(), wide.visible()[:, :n, :n])
    assert narrow.sizes.tolist() == [min(size, n) for size in wide.sizes.tolist()]


@pytest.mark.parametrize("n", [2, 8, 16, 39])
@pytest.mark.parametrize("kind", KINDS)
def test_the_path_in_the_smaller_tree_is_the_first_part_of_the_path(kind, n):
    wide, narrow = built(kind, WIDE), built(kind, n)
    args = build_args(logprobs(kind, 5, 7, 39), WIDE)
    ops.tree_build(*args)
    predicted = walk_args(args).predicted
    paths, _ = wide.walk(predicted)
    parts, _ = narrow.walk(predicted[:, :n].contiguous())
    assert [path.nodes for path in parts] == [[node for node in path.nodes if node < n] for path in paths]
    assert kind in ("nan", "inf") or any(len(path.nodes) > 1 for path in paths)


@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_comes_with_the_paths(kind):
    tree, larger = built(kind, 8), built(kind, WIDE)
    predicted = torch.zeros(5, 8, dtype=torch.int64)
    without, nothing = tree.walk(predicted)
    paths, promise = tree.walk(predicted, larger.scores)
    assert paths == without and nothing == [] and len(promise) == WIDE
    assert promise == pytest.approx(larger.scores.double().exp().mean(0).tolist(), rel=1e-6)
    assert promise[0] == 1.0
