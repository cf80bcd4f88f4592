# SPDX-License-Identifier: Apache-2.0
"""0004: DDTREE's draft pass hands the drafter what DFLASH's does, and one candidate a position is DFLASH's chain."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

BLOCK, MASK_TOKEN = 4, 11


def prepared(ddtree: bool, page_size: int) -> dict[str, Any]:
    """One step's real preparation by either worker: what the drafter was given, and what the target is to verify."""
    import torch
    from absent_kernels import absent

    absent()
    from types import SimpleNamespace

    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput
    from sglang.srt.speculative.dflash_worker import DFlashWorker
    from sglang.srt.treeverify.ddtree.draft_kv import DraftKV
    from sglang.srt.treeverify.ddtree.draft_pass import DraftPass
    from sglang.srt.treeverify.ddtree.drafting import Drafting
    from sglang.srt.treeverify.ddtree.head import TopKHead
    from sglang.srt.treeverify.ddtree.masks import MaskForm
    from sglang.srt.treeverify.ddtree.stats import Stats
    from sglang.srt.treeverify.ddtree.worker import DDTreeWorker
    from tree_batch import VOCABULARY, TreeBatch, sampling

    trees = TreeBatch([[1, 2, 3], [4, 5, 6, 7, 8], [9, 3]], [sampling()] * 3, page_size=page_size)
    batch, given = trees.batch, []
    weights = torch.randn(VOCABULARY, 6, generator=trees.generator)
    shard = SimpleNamespace(
        num_org_elements=VOCABULARY, num_org_elements_padded=VOCABULARY, num_added_elements=0,
        num_added_elements_padded=0, org_vocab_start_index=0, added_vocab_start_index=VOCABULARY,
    )  # fmt: skip
    lm_head = SimpleNamespace(weight=weights, shard_indices=shard)
    embed = torch.nn.Embedding.from_pretrained(weights)

    def forward(blocks: Any) -> Any:
        given.append(blocks)
        mixed = blocks.input_embeds + 0.1 * blocks.positions[:, None]
        return SimpleNamespace(logits_output=LogitsProcessorOutput(next_token_logits=None, hidden_states=mixed))

    drafter = SimpleNamespace(
        req_to_token_pool=trees.requests, token_to_kv_pool_allocator=trees.allocator, token_to_kv_pool=None,
        attn_backend=None, forward=forward,
    )  # fmt: skip
    model = SimpleNamespace(lm_head=lm_head, get_input_embeddings=lambda: embed)
    runner = SimpleNamespace(model=model, sampler=None, attn_backend=object.__new__(FlashInferMLAAttnBackend))
    blocks_of = DFlashVerifyInput(draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=BLOCK)
    worker = object.__new__(DDTreeWorker if ddtree else DFlashWorker)
    buffers = dict.fromkeys(f"_draft_block_{name}_buf" for name in ("ids", "positions", "tokens", "end"))
    worker.__dict__.update(
        buffers, _draft_seq_lens_cpu_buf=None, block_size=BLOCK, page_size=page_size, device=torch.device("cpu"),
        _mask_token_id=MASK_TOKEN, model_runner=SimpleNamespace(**vars(runner), device="cpu"),
        target_worker=SimpleNamespace(model_runner=runner), draft_model_runner=drafter, tp_rank=0,
        _draft_block_spec_info=blocks_of, _block_pos_offsets=torch.arange(BLOCK),
    )  # fmt: skip
    if ddtree:
        worker.__dict__.update(
            _draft_kv=object.__new__(DraftKV), _embed=embed, _width=BLOCK, _mask_form=MaskForm.PACKED, _steps=0,
            _draft_pass=DraftPass(drafter, blocks_of, MASK_TOKEN, "cpu"), tree_stats=Stats("cpu"), _checks_ranks=False,
            _drafting=Drafting(TopKHead(1), lm_head, BLOCK - 1),
        )  # fmt: skip
    draft = DFlashDraftInput(
        bonus_tokens=torch.tensor([req.output_ids[-1] for req in batch.reqs]), target_hidden=torch.empty(0, 6),
        ctx_lens=torch.zeros(3, dtype=torch.int32), draft_seq_lens=batch.seq_lens.int(),
    )  # fmt: skip
    free = trees.allocator.available_size()
    worker._prepare_for_speculative_decoding(batch, draft)
    [blocks] = given
    fields = ("input_ids", "input_embeds", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc")
    return {
        "given": {name: getattr(blocks, name).tolist() for name in fields},
        "types": {name: str(getattr(blocks, name).dtype) for name in fields if name != "input_embeds"},
        "rest": [blocks.batch_size, blocks.seq_lens_sum, str(blocks.forward_mode), str(blocks.spec_algorithm),
                 str(blocks.capture_hidden_mode), blocks.spec_info is blocks_of],
        "tokens": batch.input_ids.tolist(), "positions": batch.spec_info.positions.tolist(),
        "slots": batch.out_cache_loc.tolist(), "taken": free - trees.allocator.available_size(),
        "page": page_size, "lengths": batch.seq_lens.tolist(),
        "mapped": trees.requests.req_to_token.tolist(), "mode": str(batch.forward_mode),
    }  # fmt: skip


@pytest.fixture(scope="module", params=[1, 16], ids="pages of {}".format)
def both(patched: Worker, request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    ours, theirs = (patched(prepared, ddtree=ddtree, page_size=request.param) for ddtree in (True, False))
    return ours, theirs


def test_the_drafter_is_given_what_dflash_gives_it(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, theirs = both
    assert ours["given"] == theirs["given"]
    assert ours["types"] == theirs["types"]
    assert ours["rest"] == theirs["rest"]
    assert ours["given"]["input_ids"].count(MASK_TOKEN) >= 3 * (BLOCK - 1)


def test_one_candidate_a_position_is_verified_where_dflash_verifies_its_chain(
    both: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    ours, theirs = both
    for what in ("tokens", "positions", "slots", "taken", "mapped", "mode"):
        assert ours[what] == theirs[what], what
    page = ours["page"]
    new = sum(-(-(length + BLOCK) // page) - -(-length // page) for length in ours["lengths"])
    assert ours["taken"] == new * page, "the drafter's own slots are given back"
