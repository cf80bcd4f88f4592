# SPDX-License-Identifier: Apache-2.0
"""tree_build and tree_walk on the GPU against the reference: hard log-probabilities, every width, poisoned outputs."""

from __future__ import annotations

import random

import pytest
import torch
from tree_cases import KINDS, build_args, logprobs, same, walk_args
from treeverify.ddtree import ops
from waits import no_synchronisation

pytestmark = pytest.mark.gpu
WIDTHS = [1, 2, 3, 16, 32, 33, 63, 64, 65, 66, 67, 128, 129, 192, 255, 256]


def check(scores: torch.Tensor, n: int, prefix_dtype: torch.dtype = torch.int64, seed: int = 0) -> None:
    """Builds and walks on both devices: same bits, every element written."""
    cpu, cuda = (build_args(scores, n, prefix_dtype, device) for device in ("cpu", "cuda"))
    ops.tree_build(*cpu)
    with no_synchronisation():
        ops.tree_build(*cuda)
    for name, want, got in zip(ops.BuildArgs._fields[5:], cpu[5:], cuda[5:], strict=True):
        assert same(got, want), name
    wanted = walk_args(cpu, seed)
    walked = wanted._replace(**{k: v.cuda() for k, v in wanted._asdict().items() if isinstance(v, torch.Tensor)})
    ops.tree_walk(*wanted)
    with no_synchronisation():
        ops.tree_walk(*walked)
    assert same(walked.result, wanted.result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", WIDTHS)
def test_every_width(n, kind):
    draw = random.Random(f"{n} {kind}")
    for levels in (1, 7, 15, 63):
        for ranks in {1, min(n, 4), max(n - 1, 1), draw.randint(1, max(n - 1, 1))}:
            check(logprobs(kind, draw.choice([1, 2, 8]), levels, ranks, seed=n), n, seed=n)


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed):
    draw = random.Random(seed)
    n = draw.randint(2, 256)
    bs, levels, ranks = draw.choice([1, 3, 8, 64]), draw.randint(1, 63), draw.randint(1, min(n - 1, 64))
    scores = logprobs(draw.choice(KINDS), bs, levels, ranks, seed)
    check(scores, n, draw.choice([torch.int32, torch.int64]), seed)


@pytest.mark.parametrize(("bs", "levels", "ranks", "n"), [(1024, 7, 15, 16), (2, 255, 255, 256), (2, 255, 1, 256)])
def test_the_largest(bs, levels, ranks, n):
    check(logprobs("halves", bs, levels, ranks), n)


def test_replay_gives_the_same_bits_without_a_synchronisation():
    """Candidates, then a build and a walk in a graph: new inputs each step, the same ones twice."""
    bs, levels, ranks, n = 8, 15, 63, 64
    tree = build_args(torch.zeros(bs, levels, ranks), n, device="cuda")
    walk = walk_args(tree)._replace(predicted=torch.zeros_like(tree.tokens))
    ops.tree_build(*tree)
    ops.tree_walk(*walk)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.tree_build(*tree)
        ops.tree_walk(*walk)
    for kind in ("random", "halves", "nan", "random"):
        expected = build_args(logprobs(kind, bs, levels, ranks), n)
        ops.tree_build(*expected)
        wanted = walk_args(expected)
        ops.tree_walk(*wanted)
        for ours, theirs in zip(tree[:4], expected[:4], strict=True):
            ours.copy_(theirs)
        walk.predicted.copy_(wanted.predicted)
        for _ in range(2):
            for out in (*tree[5:], walk.result):
                out.fill_(-7)
            with no_synchronisation():
                graph.replay()
            assert all(same(got, want) for got, want in zip(tree[5:], expected[5:], strict=True))
            assert same(walk.result, wanted.result)


@pytest.mark.parametrize(
    ("bs", "levels", "ranks", "n", "most"),
    [(8, 7, 63, 64, 30), (8, 15, 63, 64, 30), (1, 7, 15, 16, 30), (64, 15, 63, 64, None), (8, 15, 255, 256, None)],
)
def test_time(bs, levels, ranks, n, most):
    """Microseconds of one build and one walk, from a graph of 20 each; `most` of a build on a Hopper card."""
    tree = build_args(logprobs("bf16", bs, levels, ranks), n, device="cuda")
    ops.tree_build(*tree)
    walk = walk_args(tree)
    build_us, walk_us = (_microseconds(op, args) for op, args in ((ops.tree_build, tree), (ops.tree_walk, walk)))
    print(f"\nbs {bs} L {levels} K {ranks} n {n}: build {build_us:.1f} us, walk {walk_us:.1f} us")
    if most is not None and torch.cuda.get_device_capability() == (9, 0):
        assert build_us <= most


def _microseconds(op, args, times: int = 20) -> float:
    op(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            op(*args)
    spans = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1000 / times)
    return min(spans)
