# SPDX-License-Identifier: Apache-2.0
"""Draft trees to build and to walk: hard log-probabilities, poisoned outputs, targets that agree now and then."""

from __future__ import annotations

import torch
from treeverify.attention.plan import mask_words
from treeverify.ddtree import ops

KINDS = ("random", "bf16", "halves", "equal", "peaked", "one-hot", "impossible", "tiny", "nan", "inf")
"""Kinds of log-probabilities. bf16, halves and equal make many ties, one-hot and impossible have -inf."""


def logprobs(kind: str, bs: int, levels: int, ranks: int, seed: int = 0) -> torch.Tensor:
    """fp32 [bs, L, K], descending along K."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, levels, ranks + 5, generator=generator) * 2
    if kind == "bf16":
        logits = (logits + 20).bfloat16().float()
    if kind == "peaked":
        logits *= 8
    found = torch.log_softmax(logits, -1).topk(ranks, -1).values
    which = torch.randint(levels * ranks, (bs,), generator=generator)
    if kind == "halves":
        found = (found * 2).round() / 2
    elif kind == "equal":
        found = torch.full_like(found, -1.5)
    elif kind == "one-hot":
        found = torch.full_like(found, -torch.inf)
        found[..., 0] = 0
    elif kind == "impossible":
        found[found < found.median()] = -torch.inf
    elif kind == "tiny":
        found = -torch.rand(found.shape, generator=generator).sort(-1).values * 1e-41  # not normal in fp32
    elif kind in ("nan", "inf"):
        found.view(bs, -1)[torch.arange(bs), which] = float(kind)
        found[::2] = -1.0  # the neighbours are sound
    return found


def build_args(
    logprobs: torch.Tensor, n: int, prefix_dtype: torch.dtype = torch.int64, device: str = "cpu"
) -> ops.BuildArgs:
    """Arguments of tree_build; the outputs, poisoned, are the last nine."""
    (bs, levels, ranks), generator = logprobs.shape, torch.Generator().manual_seed(n)
    tokens = torch.rand(bs, levels, 2 * ranks, generator=generator).argsort(-1)[..., :ranks]

    def poisoned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    return ops.BuildArgs(
        topk_logprobs=logprobs.to(device),
        topk_ids=(tokens + (1 << 40)).contiguous().to(device),
        root=torch.randint(1 << 40, (bs,), generator=generator).to(device),
        prefix_lens=torch.randint(100_000, (bs,), generator=generator).to(prefix_dtype).to(device),
        n=n,
        tokens=poisoned(torch.int64, bs, n),
        positions=poisoned(torch.int64, bs, n),
        parents=poisoned(torch.int32, bs, n),
        depths=poisoned(torch.int32, bs, n),
        mask=poisoned(torch.int64, bs, n, mask_words(n)),
        next_token=poisoned(torch.int64, bs, n),
        next_sibling=poisoned(torch.int64, bs, n),
        scores=poisoned(torch.float32, bs, n),
        sizes=poisoned(torch.int32, bs),
    )


def walk_args(tree: ops.BuildArgs, seed: int = 0) -> ops.WalkArgs:
    """Arguments of tree_walk over trees that were built; the target agrees with one path of each, in part with more."""
    generator = torch.Generator().manual_seed(seed)
    (bs, levels, _), n = tree.topk_logprobs.shape, tree.n
    predicted = torch.randint(1 << 39, (bs, n), generator=generator)
    for b, parents in enumerate(tree.parents.tolist()):
        for node in torch.randint(n, (n // 2 + 1,), generator=generator).tolist():
            while parents[node] >= 0:  # up to the root: the last of these paths is whole
                predicted[b, parents[node]] = tree.tokens[b, node]
                node = parents[node]
    result = torch.full((bs, 2 * levels + 4), -7, dtype=torch.int64, device=tree.tokens.device)
    links = (tree.next_token, tree.next_sibling)
    return ops.WalkArgs(tree.tokens, *links, tree.sizes, predicted.to(tree.tokens.device), levels, result)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same bits, wherever they are."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().contiguous().view(torch.uint8)
