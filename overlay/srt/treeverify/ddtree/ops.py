# SPDX-License-Identifier: Apache-2.0
"""torch.ops.treeverify.tree_build and tree_walk: a step's draft trees, and the path that the target takes.

On CUDA they only launch: no copy, no cast, no allocation, no synchronisation. On the CPU the reference answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..attention.checks import INDEX_BYTES, check, not_dense, not_index, not_typed
from ..attention.launch import launch
from ..attention.plan import MAX_Q, mask_words
from ..attention.reference import pack_mask
from . import abi, reference


class BuildArgs(NamedTuple):
    """Arguments of tree_build, in order. L drafted positions, K candidates of each; node 0 is the root.

    Outputs are written whole. Nodes stand in the order of `reference.build`; those past a tree's size are padding: the
    root's token and position, depth 0, a mask of themselves and the root, linked to nothing.
    """

    topk_logprobs: torch.Tensor  # fp32 [bs, L, K], descending along K
    topk_ids: torch.Tensor  # int64 [bs, L, K], the tokens they belong to
    root: torch.Tensor  # int64 [bs], the bonus tokens
    prefix_lens: torch.Tensor  # int32 or int64 [bs], tokens committed before them: the roots' positions
    n: int  # nodes of a tree
    tokens: torch.Tensor  # out: int64 [bs, n]
    positions: torch.Tensor  # out: int64 [bs, n], prefix length + depth
    parents: torch.Tensor  # out: int32 [bs, n], -1 for the root and for padding
    depths: torch.Tensor  # out: int32 [bs, n]
    mask: torch.Tensor  # out: int64 [bs, n, ceil(n / 64)], bit j of row i: j is i or an ancestor of it
    next_token: torch.Tensor  # out: int64 [bs, n], first child or -1
    next_sibling: torch.Tensor  # out: int64 [bs, n], next child of the same parent or -1
    scores: torch.Tensor  # out: fp32 [bs, n], the path's log-probability; -inf for padding
    sizes: torch.Tensor  # out: int32 [bs], nodes that are not padding. -1: NaN or +inf among the request's
    # log-probabilities; its tree is the root alone


class WalkArgs(NamedTuple):
    """Arguments of tree_walk, in order: what tree_build wrote, and what the target says.

    A row of `result`: accepted drafts; the tree's entry of `sizes`; depth + 1 nodes, the root first, then the accepted
    ones, then -1; depth + 1 tokens, those accepted, the target's own next one, then -1.
    """

    tokens: torch.Tensor  # int64 [bs, n]
    next_token: torch.Tensor  # int64 [bs, n]
    next_sibling: torch.Tensor  # int64 [bs, n]
    sizes: torch.Tensor  # int32 [bs]
    predicted: torch.Tensor  # int64 [bs, n], the target's own token after each node
    depth: int  # drafted positions: longest path
    result: torch.Tensor  # out: int64 [bs, 2 * depth + 4]


_lib = torch.library.Library("treeverify", "FRAGMENT")
_lib.define(
    "tree_build(Tensor topk_logprobs, Tensor topk_ids, Tensor root, Tensor prefix_lens, int n, Tensor(a!) tokens, "
    "Tensor(b!) positions, Tensor(c!) parents, Tensor(d!) depths, Tensor(e!) mask, Tensor(f!) next_token, "
    "Tensor(g!) next_sibling, Tensor(h!) scores, Tensor(i!) sizes) -> ()"
)
_lib.define(
    "tree_walk(Tensor tokens, Tensor next_token, Tensor next_sibling, Tensor sizes, Tensor predicted, int depth, "
    "Tensor(a!) result) -> ()"
)


def _not_shaped(shape: tuple[int, ...], **tensors: torch.Tensor) -> Iterator[str]:
    for name, t in tensors.items():
        if t.shape != shape:
            yield f"{name} is {tuple(t.shape)}, expected {shape}"


def _build_problems(a: BuildArgs) -> Iterator[str]:
    if a.topk_logprobs.dim() != 3:
        yield f"topk_logprobs is {tuple(a.topk_logprobs.shape)}, expected [bs, L, K]"
    bs, levels, ranks = a.topk_logprobs.shape
    if not 1 <= a.n <= MAX_Q:
        yield f"a tree of {a.n} nodes is not within 1 .. {MAX_Q}"
    if not 1 <= levels <= reference.MAX_LEVELS:
        yield f"{levels} drafted positions are not within 1 .. {reference.MAX_LEVELS}"
    if not 1 <= ranks <= reference.MAX_RANKS:
        yield f"{ranks} candidates a position are not within 1 .. {reference.MAX_RANKS}; a tree of n nodes needs n - 1"
    longs = {
        "tokens": a.tokens,
        "positions": a.positions,
        "next_token": a.next_token,
        "next_sibling": a.next_sibling,
    }
    ints = {"parents": a.parents, "depths": a.depths}
    yield from not_typed(torch.float32, topk_logprobs=a.topk_logprobs, scores=a.scores)
    yield from not_typed(torch.int64, topk_ids=a.topk_ids, root=a.root, mask=a.mask, **longs)
    yield from not_typed(torch.int32, sizes=a.sizes, **ints)
    yield from not_index(prefix_lens=a.prefix_lens)
    yield from _not_shaped((bs, levels, ranks), topk_ids=a.topk_ids)
    yield from _not_shaped((bs,), root=a.root, prefix_lens=a.prefix_lens, sizes=a.sizes)
    yield from _not_shaped((bs, a.n), scores=a.scores, **longs, **ints)
    yield from _not_shaped((bs, a.n, mask_words(a.n)), mask=a.mask)
    yield from not_dense(
        topk_logprobs=a.topk_logprobs,
        topk_ids=a.topk_ids,
        root=a.root,
        prefix_lens=a.prefix_lens,
        mask=a.mask,
        scores=a.scores,
        sizes=a.sizes,
        **longs,
        **ints,
    )


def _build_cuda(*args: Any) -> None:
    a = BuildArgs(*args)
    check(_build_problems(a))
    bs, levels, ranks = a.topk_logprobs.shape
    if bs == 0:
        return
    params = abi.TreeParams(
        logprobs=a.topk_logprobs.data_ptr(),
        ids=a.topk_ids.data_ptr(),
        root=a.root.data_ptr(),
        prefix_lens=a.prefix_lens.data_ptr(),
        tokens=a.tokens.data_ptr(),
        positions=a.positions.data_ptr(),
        parents=a.parents.data_ptr(),
        depths=a.depths.data_ptr(),
        mask=a.mask.data_ptr(),
        next_token=a.next_token.data_ptr(),
        next_sibling=a.next_sibling.data_ptr(),
        scores=a.scores.data_ptr(),
        sizes=a.sizes.data_ptr(),
        prefix_len_bytes=INDEX_BYTES[a.prefix_lens.dtype],
        bs=bs,
        n=a.n,
        levels=levels,
        ranks=ranks,
    )
    launch("tree_build", params, a.tokens.device)


def _build_cpu(*args: Any) -> None:
    a = BuildArgs(*args)
    check(_build_problems(a))
    for b, logprobs in enumerate(a.topk_logprobs.tolist()):
        sound = reference.is_distribution(logprobs)
        tree = reference.build(logprobs, a.n) if sound else [reference.ROOT]
        padding = a.n - len(tree)
        parents = [node.parent for node in tree] + [-1] * padding
        depths = [len(node.ranks) for node in tree] + [0] * padding
        ids, prefix = a.topk_ids[b], int(a.prefix_lens[b])
        drafted = [int(ids[len(node.ranks) - 1, node.ranks[-1]]) for node in tree[1:]]
        visible = torch.eye(a.n, dtype=torch.bool)
        visible[:, 0] = True
        for i, parent in enumerate(parents):
            if parent > 0:
                visible[i] |= visible[parent]
        first_child, next_sibling = reference.links(parents)
        a.tokens[b] = torch.tensor([int(a.root[b]), *drafted, *[int(a.root[b])] * padding])
        a.positions[b] = torch.tensor([prefix + depth for depth in depths])
        a.parents[b], a.depths[b] = torch.tensor(parents), torch.tensor(depths)
        a.mask[b] = pack_mask(visible)
        a.next_token[b], a.next_sibling[b] = torch.tensor(first_child), torch.tensor(next_sibling)
        a.scores[b] = torch.tensor([node.score for node in tree] + [-math.inf] * padding)
        a.sizes[b] = len(tree) if sound else -1


def _walk_problems(a: WalkArgs) -> Iterator[str]:
    if a.tokens.dim() != 2:
        yield f"tokens is {tuple(a.tokens.shape)}, expected [bs, n]"
    bs, n = a.tokens.shape
    if not 1 <= n <= MAX_Q:
        yield f"a tree of {n} nodes is not within 1 .. {MAX_Q}"
    if not 1 <= a.depth <= reference.MAX_LEVELS:
        yield f"depth {a.depth} is not within 1 .. {reference.MAX_LEVELS}"
    nodes = {
        "tokens": a.tokens,
        "next_token": a.next_token,
        "next_sibling": a.next_sibling,
        "predicted": a.predicted,
    }
    yield from not_typed(torch.int64, result=a.result, **nodes)
    yield from not_typed(torch.int32, sizes=a.sizes)
    yield from _not_shaped((bs, n), **nodes)
    yield from _not_shaped((bs,), sizes=a.sizes)
    yield from _not_shaped((bs, 2 * a.depth + 4), result=a.result)
    yield from not_dense(sizes=a.sizes, result=a.result, **nodes)


def _walk_cuda(*args: Any) -> None:
    a = WalkArgs(*args)
    check(_walk_problems(a))
    bs, n = a.tokens.shape
    if bs == 0:
        return
    params = abi.WalkParams(
        tokens=a.tokens.data_ptr(),
        next_token=a.next_token.data_ptr(),
        next_sibling=a.next_sibling.data_ptr(),
        sizes=a.sizes.data_ptr(),
        predicted=a.predicted.data_ptr(),
        result=a.result.data_ptr(),
        bs=bs,
        n=n,
        levels=a.depth,
    )
    launch("tree_walk", params, a.tokens.device)


def _walk_cpu(*args: Any) -> None:
    a = WalkArgs(*args)
    check(_walk_problems(a))
    for b, size in enumerate(a.sizes.tolist()):
        tree = (a.tokens[b].tolist(), a.next_token[b].tolist(), a.next_sibling[b].tolist())
        predicted = a.predicted[b].tolist()
        path = reference.walk(*tree, predicted, a.depth) if size > 0 else [0]
        out = [predicted[node] for node in path]
        unused = [-1] * (a.depth + 1 - len(path))
        a.result[b] = torch.tensor([len(path) - 1, size, *path, *unused, *out, *unused])


def _nothing(*args: Any) -> None:
    """Fake of both ops: they return nothing and write into buffers of known shape."""


for _name, _cuda, _cpu in (("tree_build", _build_cuda, _build_cpu), ("tree_walk", _walk_cuda, _walk_cpu)):
    _lib.impl(_name, _cuda, "CUDA")
    _lib.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"treeverify::{_name}", _nothing, lib=_lib)

tree_build = torch.ops.treeverify.tree_build
tree_walk = torch.ops.treeverify.tree_walk
