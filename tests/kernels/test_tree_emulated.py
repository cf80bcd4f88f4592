# SPDX-License-Identifier: Apache-2.0
"""The tree kernels' own code on an emulated block (emulator/machine.h says what is real), against the reference.

For machines without a GPU. What it can't see, tests/gpu does.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest
import torch
from tree_cases import KINDS, build_args, logprobs, same, walk_args
from treeverify.ddtree import ops


@pytest.fixture(scope="session")
def library(emulator_build: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return emulator_build("tree", cuda=False)


Emulate = Callable[[ops.BuildArgs | ops.WalkArgs, int], None]


@pytest.fixture
def emulate(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """emulate(args, order) runs the op on the emulated device; `order` seeds that of the warps."""

    def emulate(args: ops.BuildArgs | ops.WalkArgs, order: int) -> None:
        def launch(what: str, params: ctypes.Structure, device: torch.device) -> None:
            entry = getattr(library, f"tv_emulate_{what}")
            entry.restype = ctypes.c_char_p
            error = entry(ctypes.byref(params), ctypes.c_uint64(order))
            assert error is None, error.decode()

        # On the CPU the op is the reference: take the checks and the parameters that it has on CUDA.
        monkeypatch.setattr(ops, "launch", launch)
        (ops._build_cuda if isinstance(args, ops.BuildArgs) else ops._walk_cuda)(*args)

    return emulate


def draw_shape(draw: random.Random) -> tuple[int, int, int, int]:
    """bs, L, K, n: around the widths at which a word or a register is full, too."""
    n = draw.choice([1, 2, 3, 17, 33, 63, 64, 65, 66, 67, 129, 255, 256, draw.randint(2, 256)])
    ranks = draw.choice([1, 2, min(n, 8), max(n - 1, 1), draw.randint(1, max(n - 1, 1))])
    return draw.randint(1, 3), draw.choice([1, 2, 7, 15, 63]), ranks, n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_random_trees_and_walks(emulate, kind, seed):
    draw = random.Random(f"{kind} {seed}")
    bs, levels, ranks, n = draw_shape(draw)
    scores, prefix_dtype = logprobs(kind, bs, levels, ranks, seed), draw.choice([torch.int32, torch.int64])
    expected, found = (build_args(scores, n, prefix_dtype) for _ in range(2))
    ops.tree_build(*expected)
    emulate(found, seed)
    for name, want, got in zip(ops.BuildArgs._fields[5:], expected[5:], found[5:], strict=True):
        assert same(got, want), name
    wanted, walked = walk_args(expected, seed), walk_args(expected, seed)
    ops.tree_walk(*wanted)
    emulate(walked, seed)
    assert same(walked.result, wanted.result)


@pytest.mark.parametrize(("levels", "ranks", "n"), [(255, 1, 256), (255, 255, 256), (1, 255, 256)])
def test_the_largest(emulate, levels, ranks, n):
    expected, found = (build_args(logprobs("halves", 1, levels, ranks), n) for _ in range(2))
    ops.tree_build(*expected)
    emulate(found, 0)
    assert all(same(got, want) for got, want in zip(found[5:], expected[5:], strict=True))
    wanted, walked = walk_args(expected), walk_args(expected)
    ops.tree_walk(*wanted)
    emulate(walked, 0)
    assert same(walked.result, wanted.result)


@pytest.mark.parametrize("bad", [0, 1, -9, 4, 1 << 40])
@pytest.mark.parametrize("which", ["next_token", "next_sibling"])
def test_broken_links_end_the_walk(emulate, which, bad):
    """Node 1 leads to itself, back, or out of the tree; the target would take node 0 and no other there."""
    tree = build_args(logprobs("random", 1, 3, 1), 4)
    ops.tree_build(*tree)
    wanted = walk_args(tree)
    wanted.predicted[:] = tree.tokens[0, 0]
    if which == "next_token":
        wanted.predicted[0, 0] = tree.tokens[0, 1]
    getattr(tree, which)[0, 1] = bad
    walked = wanted._replace(result=torch.full_like(wanted.result, -7))
    ops.tree_walk(*wanted)
    emulate(walked, 1)
    assert same(walked.result, wanted.result)
    assert wanted.result[0, 0] == (which == "next_token"), "node 1 is taken, or passed over, and nothing after it"


def test_a_tree_deeper_than_said_is_cut(emulate):
    tree = build_args(logprobs("random", 1, 6, 1), 7)
    ops.tree_build(*tree)
    chain = torch.cat([tree.tokens[:, 1:], tree.tokens[:, :1]], 1)
    for depth in (1, 3, 6, 9):
        result = torch.zeros(1, 2 * depth + 4, dtype=torch.int64)
        args = walk_args(tree)._replace(predicted=chain, depth=depth, result=result)
        again = args._replace(result=torch.full_like(args.result, -7))
        ops.tree_walk(*args)
        emulate(again, 1)
        assert same(again.result, args.result) and args.result[0, 0] == min(depth, 6)
