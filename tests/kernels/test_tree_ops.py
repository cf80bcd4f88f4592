# SPDX-License-Identifier: Apache-2.0
"""tree_build and tree_walk on the CPU: what they write follows from the reference tree, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tree_cases import KINDS, build_args, logprobs, walk_args
from treeverify.attention.reference import unpack_mask
from treeverify.ddtree import ops, reference

SHAPES = [(1, 1, 1, 2), (2, 3, 5, 6), (3, 7, 63, 64), (2, 15, 64, 65), (1, 5, 1, 9), (2, 4, 3, 200)]
"""bs, L, K, n."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bs", "levels", "ranks", "n"), SHAPES)
def test_outputs_describe_the_tree(bs, levels, ranks, n, kind):
    a = build_args(logprobs(kind, bs, levels, ranks), n)
    ops.tree_build(*a)
    for b in range(bs):
        position = a.topk_logprobs[b].tolist()
        sound = not bool((a.topk_logprobs[b].isnan() | a.topk_logprobs[b].isposinf()).any())
        tree = reference.build(position, n) if sound else [reference.ROOT]
        size = len(tree)
        assert a.sizes[b] == (size if sound else -1)
        assert a.parents[b].tolist() == [node.parent for node in tree] + [-1] * (n - size)
        assert a.scores[b].tolist() == [node.score for node in tree] + [-torch.inf] * (n - size)
        depths = [len(node.ranks) for node in tree] + [0] * (n - size)
        assert a.depths[b].tolist() == depths
        assert (a.positions[b] - a.prefix_lens[b]).tolist() == depths
        visible = unpack_mask(a.mask[b], n)
        for i in range(n):
            seen, at = {0, i}, i
            while at > 0:
                at = int(a.parents[b, at])
                seen.add(max(at, 0))
            assert visible[i].nonzero().flatten().tolist() == sorted(seen)
            expected = a.topk_ids[b, depths[i] - 1, tree[i].ranks[-1]] if 0 < i < size else a.root[b]
            assert a.tokens[b, i] == expected
        assert (a.next_token[b].tolist(), a.next_sibling[b].tolist()) == reference.links(a.parents[b].tolist())


def test_unsound_requests_leave_their_neighbours_alone():
    a = build_args(logprobs("nan", 6, 4, 8), 9)
    ops.tree_build(*a)
    assert a.sizes.tolist() == [9, -1] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bs", "levels", "ranks", "n"), SHAPES)
def test_walk_is_the_naive_descent(bs, levels, ranks, n, kind):
    tree = build_args(logprobs(kind, bs, levels, ranks), n)
    ops.tree_build(*tree)
    walk = walk_args(tree)
    ops.tree_walk(*walk)
    for b in range(bs):
        child = {(int(tree.parents[b, i]), int(tree.tokens[b, i])): i for i in range(n)}
        path, predicted = [0], walk.predicted[b].tolist()
        while (path[-1], predicted[path[-1]]) in child:
            path.append(child[path[-1], predicted[path[-1]]])
        accepted, size, *rest = walk.result[b].tolist()
        assert (accepted, size) == (len(path) - 1, int(tree.sizes[b]))
        unused = [-1] * (levels + 1 - len(path))
        assert rest == [*path, *unused, *[predicted[node] for node in path], *unused]
        assert [int(tree.tokens[b, node]) for node in path[1:]] == rest[levels + 1 : levels + len(path)]


def test_the_targets_of_these_tests_agree_for_a_while():
    tree = build_args(logprobs("random", 40, 7, 8), 30)
    ops.tree_build(*tree)
    walk = walk_args(tree)
    ops.tree_walk(*walk)
    assert set(walk.result[:, 0].tolist()) >= {1, 2, 3}


def test_fakes_trace_without_running():
    with FakeTensorMode():
        a = build_args(torch.zeros(2, 3, 4), 5)
        assert ops.tree_build(*a) is None
        links, result = (a.next_token, a.next_sibling), a.tokens.new_empty(2, 10)
        assert ops.tree_walk(a.tokens, *links, a.sizes, a.tokens, 3, result) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_logprobs": torch.zeros(2, 3)}, r"topk_logprobs is \(2, 3\), expected \[bs, L, K\]"),
        ({"topk_logprobs": torch.zeros(2, 3, 4).half()}, "topk_logprobs is torch.float16, expected torch.float32"),
        ({"n": 257}, "a tree of 257 nodes is not within 1 .. 256"),
        ({"topk_logprobs": torch.zeros(2, 3, 256)}, "256 candidates a position are not within 1 .. 255"),
        ({"topk_logprobs": torch.zeros(2, 0, 4)}, "0 drafted positions are not within 1 .. 255"),
        ({"topk_ids": torch.zeros(2, 3, 5).long()}, r"topk_ids is \(2, 3, 5\), expected \(2, 3, 4\)"),
        ({"prefix_lens": torch.zeros(2)}, "prefix_lens is torch.float32, expected int32 or int64"),
        ({"root": torch.zeros(3).long()}, r"root is \(3,\), expected \(2,\)"),
        ({"mask": torch.zeros(2, 5, 2).long()}, r"mask is \(2, 5, 2\), expected \(2, 5, 1\)"),
        ({"sizes": torch.zeros(2).long()}, "sizes is torch.int64, expected torch.int32"),
        ({"tokens": torch.zeros(5, 2).long().T}, r"tokens has strides \(1, 2\), expected contiguous"),
    ],
)
def test_bad_builds_are_named(change, message):
    args = build_args(torch.zeros(2, 3, 4), 5)
    with pytest.raises(ValueError, match="treeverify: " + message):
        ops.tree_build(*args._replace(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(5).long()}, r"tokens is \(5,\), expected \[bs, n\]"),
        ({"predicted": torch.zeros(2, 5).int()}, "predicted is torch.int32, expected torch.int64"),
        ({"depth": 0}, "depth 0 is not within 1 .. 255"),
        ({"depth": 4}, r"result is \(2, 10\), expected \(2, 12\)"),
        ({"sizes": torch.zeros(1).int()}, r"sizes is \(1,\), expected \(2,\)"),
    ],
)
def test_bad_walks_are_named(change, message):
    tree = build_args(torch.zeros(2, 3, 4), 5)
    ops.tree_build(*tree)
    with pytest.raises(ValueError, match="treeverify: " + message):
        ops.tree_walk(*walk_args(tree)._replace(**change))
