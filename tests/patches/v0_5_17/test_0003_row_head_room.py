# SPDX-License-Identifier: Apache-2.0
"""0003: near the context length the slots reserved for a request stay in its own row of req_to_token."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

CONTEXT = 100


def reserved(width: int, page_size: int, algorithm: str) -> dict[str, Any]:
    """What the real reservation of a decode step writes for a request one token short of the context length."""
    import torch
    from absent_kernels import absent

    absent()
    from types import SimpleNamespace

    from mla_rig import parallel_groups, server_args
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
    from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode

    parallel_groups()
    args = server_args(
        speculative_algorithm=algorithm, speculative_num_draft_tokens=width, page_size=page_size,
        speculative_num_steps=1, speculative_eagle_topk=1,
    )  # fmt: skip
    row = CONTEXT + get_req_to_token_extra_context_len(args)
    requests = ReqToTokenPool(4, row, "cpu", False)
    pool = MLATokenToKVPool(4096, page_size, torch.bfloat16, 8, 8, 1, "cpu", False)
    kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
    pages = () if page_size == 1 else (page_size,)
    allocator = kind(4096, *pages, torch.bfloat16, "cpu", pool, False)
    committed = CONTEXT - 1
    allocated = -(-committed // page_size) * page_size
    neighbour = torch.full((row,), 7, dtype=torch.int32)
    requests.req_to_token[1, :allocated] = allocator.alloc(allocated).int()
    requests.req_to_token[2] = neighbour
    req = SimpleNamespace(
        kv_committed_len=committed, kv=ReqKvInfo(kv_allocated_len=committed, swa_evicted_seqlen=0),
        sampling_params=SimpleNamespace(top_k=1), decode_batch_idx=0,
    )  # fmt: skip
    lens = torch.tensor([committed])
    batch = SimpleNamespace(
        reqs=[req], batch_size=lambda: 1, device="cpu", token_to_kv_pool_allocator=allocator,
        tree_cache=SimpleNamespace(
            token_to_kv_pool_allocator=allocator, is_chunk_cache=lambda: True, supports_swa=lambda: False
        ),
        req_to_token_pool=requests, req_pool_indices=torch.tensor([1]), seq_lens=lens, seq_lens_cpu=lens,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        maybe_evict_swa=lambda: None,
    )  # fmt: skip
    if algorithm == "NGRAM":
        eagle_prepare_for_decode(batch)
    else:
        none = torch.empty(1)
        DFlashDraftInputV2(none, none, none, none, none).prepare_for_decode(batch)
    return {
        "row": row, "allocated": req.kv.kv_allocated_len,
        "neighbour": int((requests.req_to_token[2] != neighbour).sum()),
    }  # fmt: skip


@pytest.mark.parametrize("algorithm, page_size", [("DFLASH", 1), ("DFLASH", 16), ("NGRAM", 1)])
def test_no_other_request_is_written(patched: Worker, stock: Worker, algorithm: str, page_size: int) -> None:
    ours = patched(reserved, width=64, page_size=page_size, algorithm=algorithm)
    assert ours["neighbour"] == 0 and CONTEXT + 2 * 64 <= ours["allocated"] + 1 <= ours["row"] + 1
    theirs = stock(reserved, width=64, page_size=page_size, algorithm=algorithm)
    assert (theirs["neighbour"] > 0) is (page_size == 1), "the day that SGLang mends it, the patch can go"
