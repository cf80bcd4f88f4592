# SPDX-License-Identifier: Apache-2.0
"""DDTree's draft tree and its walk on the host, written to be read: what the kernels of kernels/tree must equal.

The tree is Algorithm 1 of arXiv 2604.12989: the drafter gives a distribution for each position, independent of the
path; the prefixes that are likeliest under their product are closed under taking parents, and a heap finds them in
order. The walk is that of section 4.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

MAX_LEVELS = 255
"""Most drafted positions that the kernels and their packed places hold."""
MAX_RANKS = 255
"""Most candidates of a position."""


class Node(NamedTuple):
    """A node of a draft tree: a prefix of drafted tokens."""

    parent: int
    """Number of its parent in the tree; -1 for the root."""
    ranks: tuple[int, ...]
    """Which candidate it takes at each position, from the first on; empty for the root."""
    score: float
    """Sum of their log-probabilities, added up from the first on, each sum rounded to fp32."""


ROOT = Node(-1, (), 0.0)


def build(logprobs: Sequence[Sequence[float]], n: int) -> list[Node]:
    """The likeliest prefixes, best first; of equal ones the smaller `ranks` first. Prefixes of score -inf never count.

    Args:
        logprobs: fp32 numbers [L, K], each position's candidates in descending order.
        n: nodes at most, the root among them.

    Returns:
        The root, then the prefixes: a parent before its children.
    """
    tree = [ROOT]
    heap: list[tuple[float, tuple[int, ...], int]] = [(-_fp32(ROOT.score + logprobs[0][0]), (0,), 0)]
    while heap and len(tree) < n:
        negative, ranks, parent = heapq.heappop(heap)
        if negative == math.inf:
            break
        *front, last = ranks
        position = logprobs[len(front)]
        if last + 1 < len(position):
            score = _fp32(tree[parent].score + position[last + 1])
            heapq.heappush(heap, (-score, (*front, last + 1), parent))
        if len(ranks) < len(logprobs):
            score = _fp32(-negative + logprobs[len(ranks)][0])
            heapq.heappush(heap, (-score, (*ranks, 0), len(tree)))
        tree.append(Node(parent, ranks, -negative))
    return tree


def is_distribution(logprobs: Sequence[Sequence[float]]) -> bool:
    """Whether all are numbers below +inf: no path sum is NaN then."""
    return all(x < math.inf for position in logprobs for x in position)


def links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """First child of each node and next child of its parent, in the order of the nodes; -1 where there is none."""
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    youngest: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in youngest:
            next_sibling[youngest[parent]] = node
        else:
            first_child[parent] = node
        youngest[parent] = node
    return first_child, next_sibling


def walk(
    tokens: Sequence[int], next_token: Sequence[int], next_sibling: Sequence[int], predicted: Sequence[int], depth: int
) -> list[int]:
    """The root, then child after child whose token is the target's own after its parent, at most `depth` of them.

    Links lead to greater numbers; one that does not ends the walk.

    Args:
        tokens: [n], of the nodes.
        next_token: [n], first children.
        next_sibling: [n].
        predicted: [n], the target's token after each node.
    """

    def link(to: int, origin: int) -> int:
        return to if origin < to < len(tokens) else -1

    path = [0]
    while len(path) <= depth:
        node = link(next_token[path[-1]], path[-1])
        while node >= 0 and tokens[node] != predicted[path[-1]]:
            node = link(next_sibling[node], node)
        if node < 0:
            break
        path.append(node)
    return path


def _fp32(x: float) -> float:
    """Rounded to fp32. A sum of two fp32 numbers, exact enough in double, becomes their fp32 sum."""
    return ctypes.c_float(x).value
