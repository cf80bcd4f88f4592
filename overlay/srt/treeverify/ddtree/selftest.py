# SPDX-License-Identifier: Apache-2.0
"""DDTREE's kernels on this machine's GPU against their CPU implementations; part of `treeverify.selftest`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from . import head_ops
from .tree import Candidates, DraftTree

SHAPES = [(1, 7, 15, 16, 163_840), (8, 7, 63, 64, 32_000), (3, 15, 31, 200, 1_024), (2, 7, 1, 8, 129)]
"""Requests, drafted positions, candidates a position, nodes, vocabulary."""

LOGPROB_TOLERANCE = 1e-4
"""Nats. Ids must be the same."""


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """One row a shape: candidates, trees and paths, all equal or not. Ties are common: logits are rounded."""
    for bs, depth, k, n, vocabulary in SHAPES:
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(bs * depth, vocabulary, generator=generator) * 3).bfloat16()
        there, here = _candidates(logits.cuda(), k, bs), _candidates(logits, k, bs)
        same_ids = bool(torch.equal(there.ids.cpu(), here.ids))
        apart = float((there.logprobs.cpu() - here.logprobs).abs().max())
        root, lengths = torch.randint(vocabulary, (bs,), generator=generator), torch.arange(bs) * 1000 + 5
        built = DraftTree.build(Candidates(here.ids.cuda(), here.logprobs.cuda()), root.cuda(), lengths.cuda(), n)
        expected = DraftTree.build(here, root, lengths, n)
        parts = [field.name for field in dataclasses.fields(DraftTree) if field.name != "depth"]
        wrong = [name for name in parts if not torch.equal(getattr(built, name).cpu(), getattr(expected, name))]
        children = expected.next_token.clamp(min=0)
        predicted = expected.tokens.gather(1, children)  # the target agrees with every first child
        same_paths = built.walk(predicted.cuda()) == expected.walk(predicted)
        yield {
            "bs": bs, "n": n, "variant": "draft trees", "positions": depth, "candidates": k, "vocabulary": vocabulary,
            "same_candidates": same_ids, "logprobs_apart": apart, "tree_parts_that_differ": wrong,
            "same_paths": same_paths, "ok": same_ids and apart <= LOGPROB_TOLERANCE and not wrong and same_paths,
        }  # fmt: skip


def _candidates(logits: torch.Tensor, k: int, bs: int) -> Candidates:
    """Of [bs * depth, V] logits, on their device."""
    count, device = logits.shape[0], logits.device
    lists = torch.empty(count, head_ops.list_count(logits.shape[1]), k + 1, dtype=torch.int64, device=device)
    ids = torch.empty(count, k, dtype=torch.int64, device=device)
    logprobs = torch.empty(count, k, dtype=torch.float32, device=device)
    torch.ops.treeverify.topk_lists(logits, 0, lists)
    torch.ops.treeverify.topk_merge(lists[None], ids, logprobs)
    return Candidates(ids.view(bs, -1, k), logprobs.view(bs, -1, k))
