# SPDX-License-Identifier: Apache-2.0
"""0004: DDTREE on pages larger than a token: paths are committed where a chain would be, and freed as DFLASH frees."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker


def freed_slots(seed: int, cases: int) -> list[Any]:
    """Random steps whose freed rows are not those behind what SGLang's own chain commit keeps."""
    import random

    import torch
    from sglang.srt.speculative.dflash_info import _compute_paged_keep_slots
    from sglang.srt.treeverify.ddtree.commit import places

    draw, wrong = random.Random(seed), []
    for _ in range(cases):
        page, n, bs = draw.choice([2, 16, 32, 64]), draw.randint(2, 80), draw.randint(1, 5)
        prefixes = [draw.randint(1, 300) for _ in range(bs)]
        paths = [[0, *sorted(draw.sample(range(1, n), draw.randint(0, min(n - 1, 15))))] for _ in range(bs)]
        at = places(paths, n, prefixes, page)
        lengths = torch.tensor([len(path) for path in paths])
        keep = _compute_paged_keep_slots(
            prefix_lens=torch.tensor(prefixes), commit_lens=lengths, draft_token_num=n, page_size=page
        )
        due = [b * n + i for b in range(bs) for i in range(int(keep[b]), n)]
        kept = [b * n + i for b in range(bs) for i in range(len(paths[b]))]
        if [*at.freed] != due or [*at.kept] != kept or set(due) & set(kept):
            wrong.append([page, n, prefixes, paths])
        moved = {dst: src for mine in at.moves for src, dst in mine}
        if [moved.get(row, row) for row in at.kept] != at.nodes:
            wrong.append([page, n, paths, at.moves])
    return wrong


def test_the_pages_that_dflash_would_free_are_freed(patched: Worker) -> None:
    assert patched(freed_slots, seed=0, cases=300) == []


def chain_commit(ddtree: bool, page_size: int) -> dict[str, Any]:
    """Two steps of chains, committed by either verify input: all that the pools and the batch hold afterwards."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from tree_batch import TreeBatch, sampling

    trees = TreeBatch([[1, 2, 3], [4] * 15, [9, 3] * 8, [7] * 31], [sampling()] * 4, page_size=page_size, slots=1024)
    batch, n, found = trees.batch, 12, []
    batch.model_config.think_end_id = None
    for _ in range(2):
        candidates = trees.candidates(n - 1, 1, noise=1.0)
        if ddtree:
            made = trees.verify_input(candidates, n)
            tree = made.tree
        else:
            from sglang.srt.treeverify.ddtree.tree import DraftTree

            root = torch.tensor([req.output_ids[-1] for req in batch.reqs])
            tree = DraftTree.build(candidates, root, batch.seq_lens, n)
            made = DFlashVerifyInput(tree.tokens.view(-1), tree.positions.view(-1), n)
            made.prepare_for_verify(batch, page_size, build_custom_mask=False)
        hidden = torch.arange(len(batch.out_cache_loc), dtype=torch.float32)[:, None].repeat(1, 3)
        output = LogitsProcessorOutput(next_token_logits=trees.logits(tree), hidden_states=hidden)
        bonus, lengths, kept, drafts = made.verify(batch=batch, logits_output=output, page_size=page_size)
        found.append([bonus.tolist(), lengths.tolist(), kept.tolist(), drafts, batch.out_cache_loc.tolist()])
    lost = trees.unaccounted()
    accounts = [[req.kv_committed_len, req.kv_allocated_len, req.output_ids] for req in batch.reqs]
    lists = [trees.allocator.free_pages.tolist(), trees.allocator.release_pages.tolist()]
    rows = [trees.requests.req_to_token[req.req_pool_idx, : req.kv_committed_len].tolist() for req in batch.reqs]
    lengths = [batch.seq_lens.tolist(), batch.seq_lens_cpu.tolist(), batch.seq_lens_sum]
    return {"steps": found, "accounts": accounts, "free": lists, "rows": rows, "lengths": lengths, "lost": lost}


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chain_is_committed_as_dflash_commits_it(patched: Worker, page_size: int) -> None:
    ours, theirs = (patched(chain_commit, ddtree=ddtree, page_size=page_size) for ddtree in (True, False))
    assert max(length for step in ours["steps"] for length in step[1]) > 2, "paths are longer than the root"
    if page_size == 1:  # the order of freed slots differs, their set not
        for side in (ours, theirs):
            side["free"] = [sorted(slots) for slots in side["free"]]
    assert ours == theirs and ours["lost"] == 0


def unmovable() -> list[str]:
    """What DDTREE's worker says of pools with more to them, and of one that it can move."""
    from types import SimpleNamespace

    import torch
    from absent_kernels import absent

    absent()
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.treeverify.ddtree.layers import mover_of
    from sglang.srt.treeverify.gates import TreeRefused

    class IndexedPool(MLATokenToKVPool):
        pass

    args = (64, 16, torch.bfloat16)
    pools = [
        IndexedPool(*args, 8, 8, 1, "cpu", False), MLATokenToKVPool(*args, 9, 8, 1, "cpu", False),
        MLATokenToKVPool(*args, 8, 8, 1, "cpu", False), MHATokenToKVPool(*args, 2, 8, 1, "cpu", False),
    ]  # fmt: skip
    said = []
    for pool in pools:
        try:
            said.append(type(mover_of(SimpleNamespace(token_to_kv_pool=pool))).__name__)
        except TreeRefused as e:
            said.append(str(e))
    return said


def test_pools_with_more_to_them_are_refused(patched: Worker) -> None:
    indexed, odd, latent, keys = patched(unmovable)
    assert "IndexedPool" in indexed and "--page-size 1" in indexed
    assert "34 bytes" in odd and "16 bytes" in odd
    assert latent == keys == "Mover"


def awaited() -> dict[str, Any]:
    """Which layers are waited for, and what their rows held by then."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.treeverify.kv.pools import Mover

    pool = MLATokenToKVPool(64, 16, torch.bfloat16, 8, 8, 3, "cpu", False)

    class Loading:
        """A layer's rows arrive when it is waited for."""

        waits: list[int] = []

        def wait_until(self, layer: int) -> None:
            self.waits.append(layer)
            pool.kv_buffer[layer][20] = layer + 1

    pool.register_layer_transfer_counter(Loading())
    Mover(pool)(torch.tensor([20]), torch.tensor([33]))
    return {"waits": Loading.waits, "moved": [float(buffer[33, 0, 0]) for buffer in pool.kv_buffer]}


def test_layers_that_are_still_loaded_are_waited_for(patched: Worker) -> None:
    assert patched(awaited) == {"waits": [0, 1, 2], "moved": [1.0, 2.0, 3.0]}
