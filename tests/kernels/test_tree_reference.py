# SPDX-License-Identifier: Apache-2.0
"""ddtree/reference.py against brute force: which prefixes make the tree, in which order, and which path is walked."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import KINDS, logprobs
from treeverify.ddtree import reference

FEW = st.sampled_from([0.0, -0.5, -1.0, -1.5, -math.inf])
ANY = st.one_of(FEW, st.floats(-60, 0, width=32), st.floats(-(2.0**-20), 0, width=32))


@st.composite
def positions(draw, values=ANY):
    """Log-probabilities [L, K], each position's in descending order."""
    deep, wide = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(values, min_size=wide, max_size=wide).map(lambda row: sorted(row, reverse=True))
    return draw(st.lists(row, min_size=deep, max_size=deep))


def path_sum(table: list[list[float]], ranks: tuple[int, ...]) -> float:
    """In fp32, from the root on, by torch."""
    total = torch.zeros((), dtype=torch.float32)
    for position, rank in zip(table, ranks, strict=False):
        total = total + torch.tensor(position[rank], dtype=torch.float32)
    return float(total)


def brute_force(table: list[list[float]], n: int) -> list[tuple[tuple[int, ...], float]]:
    """The n - 1 likeliest of all prefixes, with their scores."""
    wide = range(len(table[0]))
    prefixes = [p for deep in range(1, len(table) + 1) for p in itertools.product(wide, repeat=deep)]
    scored = sorted((-path_sum(table, p), p) for p in prefixes)
    return [(p, -negative) for negative, p in scored[: n - 1] if negative < math.inf]


@settings(deadline=None, max_examples=150)
@given(table=st.one_of(positions(), positions(values=FEW)), n=st.integers(1, 40))
def test_the_likeliest_prefixes_in_order(table, n):
    root, *tree = reference.build(table, n)
    assert root == (-1, (), 0.0)
    assert [(node.ranks, node.score) for node in tree] == brute_force(table, n)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nan", "inf")])
@pytest.mark.parametrize(("levels", "ranks", "n"), [(1, 255, 256), (15, 63, 64), (63, 3, 200)])
def test_parents_come_first(levels, ranks, n, kind):
    tree = reference.build(logprobs(kind, 1, levels, ranks)[0].tolist(), n)
    assert len(tree) <= n
    for i, node in enumerate(tree[1:], 1):
        assert node.parent < i and tree[node.parent].ranks == node.ranks[:-1]
        assert node.score <= min(tree[node.parent].score, tree[i - 1].score)


def test_equal_prefixes_come_in_lexicographic_order():
    ranks = [node.ranks for node in reference.build([[0.0] * 2] * 3, 15)]
    assert ranks == sorted(ranks) and len(ranks) == 15


@pytest.mark.parametrize("n", [1, 2, 8, 20])
def test_one_candidate_makes_the_chain(n):
    tree = reference.build([[-0.5]] * 12, n)
    assert [node.ranks for node in tree] == [(0,) * deep for deep in range(min(n, 13))]
    assert [node.parent for node in tree] == list(range(-1, len(tree) - 1))


def test_a_certain_drafter_makes_the_chain():
    tree = reference.build([[0.0, -math.inf, -math.inf]] * 5, 40)
    assert [node.ranks for node in tree] == [(0,) * deep for deep in range(6)]


def test_nothing_possible_leaves_the_root():
    assert reference.build([[-math.inf] * 3] * 2, 9) == [reference.ROOT]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_log_probability_is_found(bad):
    assert reference.is_distribution([[-1.0, -math.inf], [0.0, -2.0]])
    assert not reference.is_distribution([[-1.0, -math.inf], [0.0, bad]])


@given(seed=st.integers(0, 2**30), n=st.integers(1, 60))
def test_links_lead_to_every_child_once_in_order(seed, n):
    random = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(i, (1,), generator=random)) for i in range(1, n)]
    parents[n - n // 5 :] = [-1] * (n // 5)  # padding
    first_child, next_sibling = reference.links(parents)
    for node in range(n):
        children, at = [], first_child[node]
        while at >= 0:
            children.append(at)
            at = next_sibling[at]
        assert children == [i for i, parent in enumerate(parents) if parent == node]
    assert all(next_sibling[i] == -1 for i, parent in enumerate(parents) if parent == -1)


def test_links_that_lead_back_or_out_end_the_walk():
    assert reference.walk([5, 6, 7], [0, 1, 2], [-1] * 3, [5, 6, 7], 4) == [0]
    assert reference.walk([5, 6, 7], [3, -1, -1], [-1] * 3, [6, 0, 0], 4) == [0]
    assert reference.walk([5, 6, 7], [1, -1, -1], [-1, 1, -1], [9, 0, 0], 4) == [0]
    assert reference.walk([5, 6, 7], [1, 2, -1], [-1] * 3, [6, 7, 0], 4) == [0, 1, 2]
    assert reference.walk([5, 6, 7], [1, 2, -1], [-1] * 3, [6, 7, 0], 1) == [0, 1], "no longer than it may be"
