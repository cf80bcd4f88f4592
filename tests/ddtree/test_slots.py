# SPDX-License-Identifier: Apache-2.0
"""Paths walked and committed on the device are those of the host, and their KV goes where a chain would have had it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import KINDS, build_args, logprobs, walk_args
from treeverify.ddtree import ops
from treeverify.ddtree.slots import behind, moves
from treeverify.ddtree.tree import Candidates, DraftTree

BS, BLOCK, CONTEXT = 5, 8, 160


@settings(max_examples=40)
@given(kind=st.sampled_from(KINDS), n=st.integers(BLOCK, 40), seed=st.integers(0, 99))
def test_the_committed_slots_hold_the_path_that_the_host_walks(kind, n, seed):
    args = build_args(logprobs(kind, BS, BLOCK - 1, 39), n)
    ops.tree_build(*args)
    tree = DraftTree.build(Candidates(args.topk_ids, args.topk_logprobs), args.root, args.prefix_lens, n)
    predicted = walk_args(args).predicted
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(2 * BS * CONTEXT, generator=generator).view(2 * BS, CONTEXT).int()
    rows = torch.randperm(2 * BS, generator=generator)[:BS]
    lens = torch.randint(0, CONTEXT - n + 1, (BS,), generator=generator)

    slots = behind(table, rows, lens, n)
    walked, (paths, _) = tree.walk_on_device(predicted), tree.walk(predicted)
    src, dst = (entries.view(BS, BLOCK) for entries in moves(slots, walked.nodes))

    assert walked.lengths.tolist() == [len(path.nodes) for path in paths] and walked.lengths.dtype == torch.int32
    assert walked.bonus.tolist() == [path.tokens[-1] for path in paths]
    for b, (path, row, length) in enumerate(zip(paths, rows.tolist(), lens.tolist(), strict=True)):
        kept = len(path.nodes)
        own = table[row, length : length + n].tolist()
        assert walked.nodes[b, :kept].tolist() == path.nodes and walked.tokens[b, :kept].tolist() == path.tokens
        assert src[b, :kept].tolist() == [own[node] for node in path.nodes]
        assert dst[b].tolist() == own[:BLOCK]
        assert src[b, kept:].tolist() == own[kept:BLOCK], "what is behind a path stays"
