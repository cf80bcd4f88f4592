# SPDX-License-Identifier: Apache-2.0
"""0004: under overlap scheduling DDTREE writes what the target alone would, and one candidate is DFLASH's chain."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

PROMPTS = [[1, 2, 3, 4], [1, 2, 3, 5], [7, 7], [9, 10, 2, 1, 2, 3], [1, 2, 3, 4, 5]]


def decoded(
    algorithm: str = "DDTREE", block: int = 4, width: int = 12, topk: str = "", noise: float = 1.0, page_size: int = 1,
    backend: str = "flashinfer", keep: str = "", sampled: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Greedy requests to their ends, some finishing while others go on; `keep` takes a part of a step away.

    sampled: they are drawn by the sampler, of one candidate each, beside a request that draws freely.
    """
    import os
    from unittest import mock

    from absent_kernels import absent

    absent()
    from overlap_batch import Overlap, sampling
    from sglang.srt.treeverify.ddtree.candidates import TOPK

    stops = {1: [3, 9]}
    drawn = {"temperature": 1.0, "top_p": 0.001} if sampled else {}
    params = [sampling(max_new_tokens=12 + 5 * i, stop_token_ids=stops.get(i), **drawn) for i in range(len(PROMPTS))]
    if sampled:
        params[-1] = sampling(max_new_tokens=20, temperature=1.5)
    with mock.patch.dict(os.environ, {TOPK: topk}):
        world = Overlap(
            algorithm, PROMPTS, params, block=block, width=width, noise=noise, page_size=page_size, backend=backend
        )
    if keep == "kv":
        world.worker._mover = lambda *_, **__: None
    results = world.run()
    written = [list(req.output_ids) for req in world.everyone]
    alone = [world.law.alone(req.origin_input_ids, len(req.output_ids)) for req in world.everyone]
    return {
        "written": written, "alone": alone, "lost": world.unaccounted(),
        "taken": [result.accept_lens.tolist() for result in results],
        "reasons": [type(req.finished_reason).__name__ for req in world.everyone],
        "backend": type(world.rig.runner.attn_backend).__name__,
        "drafts_with": [world.drafters_args.speculative_num_draft_tokens, world.rig.args.speculative_num_draft_tokens],
    }  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"noise": 3.0, "width": 5},
        {"noise": 0.3, "block": 8, "width": 33},
        {"page_size": 16},
        {"page_size": 64, "backend": "triton"},
    ],
    ids=str,
)
def test_greedy_output_is_the_targets_and_no_slot_is_lost(patched: Worker, case: dict[str, Any]) -> None:
    found = patched(decoded, **case)
    assert found["written"] == found["alone"]
    assert found["lost"] == 0
    steps, taken = [len(step) for step in found["taken"]], [n for step in found["taken"] for n in step]
    assert len(set(steps)) > 1, "requests finish while others go on"
    assert max(taken) > max(min(taken), 2), "paths of several lengths"
    assert {"FINISH_LENGTH", "FINISH_MATCHED_TOKEN"} == set(found["reasons"])
    assert found["backend"].endswith("VerifyBackend")
    assert found["drafts_with"] == [case.get("block", 4), case.get("width", 12)]


def test_drawn_tokens_are_those_of_each_requests_own_parameters(patched: Worker) -> None:
    found = patched(decoded, sampled=True)
    assert found["written"][:-1] == found["alone"][:-1] and found["lost"] == 0
    assert found["written"][-1] != found["alone"][-1]


def test_the_check_sees_kv_that_was_not_moved(patched: Worker) -> None:
    found = patched(decoded, keep="kv")
    assert found["written"] != found["alone"]


def test_one_candidate_a_position_takes_the_tokens_of_dflash(patched: Worker) -> None:
    ours, dflash = patched(decoded, topk="1", width=4), patched(decoded, algorithm="DFLASH", width=4)
    assert ours["written"] == dflash["written"] and ours["taken"] == dflash["taken"]
    assert dflash["written"] == dflash["alone"] and dflash["lost"] == 0
    assert max(n for step in dflash["taken"] for n in step) > 2


def constrained() -> dict[str, Any]:
    """Requests under a grammar, of SGLang's interface, and one without, in a batch."""
    import torch
    from absent_kernels import absent

    absent()
    from overlap_batch import VOCABULARY, Overlap, sampling
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

    def follows(token: int) -> list[int]:
        return [(token + step) % VOCABULARY for step in (1, 4, 5, 9)]

    class Steps(BaseGrammarObject):
        """After each token four others may follow."""

        def __init__(self, first: int) -> None:
            super().__init__()
            self.text = [first]

        def accept_token(self, token: int) -> None:
            if token not in follows(self.text[-1]):
                raise ValueError(f"{token} after {self.text[-1]}")
            self.text.append(token)

        def rollback(self, k: int) -> None:
            del self.text[len(self.text) - k :]

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
            return torch.full((batch_size, 1), -1, dtype=torch.int32)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
            vocab_mask[idx, 0] = sum(1 << token for token in follows(self.text[-1]))

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            allowed = (vocab_mask >> torch.arange(logits.shape[1], dtype=torch.int32)) & 1
            logits.masked_fill_(allowed == 0, float("-inf"))

    world = Overlap("DDTREE", PROMPTS[:3], [sampling(max_new_tokens=25)] * 3, block=4, width=16)
    bound = world.everyone[:2]
    for req in bound:
        req.grammar = Steps(req.output_ids[-1])
    world.batch.has_grammar = True
    results = world.run()
    expected = []
    for req in world.everyone:
        text = [*req.origin_input_ids, req.output_ids[0]]
        while len(text) < len(req.origin_input_ids) + len(req.output_ids):
            logits = world.law(text)
            allowed = follows(text[-1]) if req in bound else range(VOCABULARY)
            text.append(max(allowed, key=lambda token, logits=logits: float(logits[token])))
        expected.append(text[len(req.origin_input_ids) :])
    free = [world.law.alone(req.origin_input_ids, len(req.output_ids)) for req in bound]
    return {
        "written": [list(req.output_ids) for req in world.everyone], "expected": expected, "free": free,
        "most": max(int(result.accept_lens.max()) for result in results), "lost": world.unaccounted(),
    }  # fmt: skip


def test_a_grammar_holds_along_every_path(patched: Worker) -> None:
    found = patched(constrained)
    assert found["written"] == found["expected"] and found["lost"] == 0
    assert found["written"][:2] != found["free"] and found["most"] > 2


def test_trees_take_more_than_chains(patched: Worker) -> None:
    trees, chains = patched(decoded, width=12), patched(decoded, topk="1", width=12)
    mean = [
        sum(map(sum, found["taken"])) / sum(map(len, found["taken"])) for found in (trees, chains)
    ]  # fmt: skip
    assert mean[0] > mean[1] + 0.2
