# SPDX-License-Identifier: Apache-2.0
"""EAGLE builds its masks as treeverify's backends ask, of the draft's columns alone, and they are followed."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

pytestmark = pytest.mark.pin("v0.5.17", "v0.5.23")

BF16 = 5e-3
WRONG = 0.05
"""A mask that is not honoured moves some row of these inputs by far more than this."""
TOPK, STEPS, N = 4, 3, 8


def _drafted(prefixes: list[int], backend: Any) -> Any:
    """The verify input that EAGLE's worker makes of random draft probabilities, and which nodes each node sees."""
    from types import SimpleNamespace

    import releases
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    generator, bs, scores = torch.Generator().manual_seed(3), len(prefixes), None
    drawn: list[Any] = []
    with torch.compiler.set_stance("force_eager"):
        for i in range(STEPS):
            rows = bs if i == 0 else bs * TOPK
            probs, ids = torch.rand(rows, 50, generator=generator).softmax(-1).topk(TOPK)
            _, _, scores, info = select_top_k_tokens(i, probs, ids, None, scores, TOPK)
            drawn.append(info)
    parents, index, tokens = eagle_utils.organize_draft_results(*(list(part) for part in zip(*drawn, strict=True)), N)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor(prefixes), seq_lens_sum=None)
    kernels = releases.imported().tree_kernels()
    kernels._is_xpu = True  # SGLang's own Triton kernel builds the tree: its CUDA one needs a GPU
    try:
        made = build_eagle_verify_input(
            batch, SimpleNamespace(bonus_tokens=torch.zeros(bs, dtype=torch.int64)), parents, index, tokens, None,
            target_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)), topk=TOPK,
            num_steps=STEPS, num_draft_tokens=N, tree_mask_mode=eagle_utils.TreeMaskMode.FULL_MASK, device="cpu",
        )  # fmt: skip
    finally:
        kernels._is_xpu = False
    visible = torch.eye(N, dtype=torch.bool).repeat(bs, 1, 1)
    for b in range(bs):
        for node in range(N):  # children stand behind their parents
            child = int(made.retrieve_next_token[b, node])
            while child >= 0:
                visible[b, child] |= visible[b, node]
                child = int(made.retrieve_next_sibling[b, child])
    return made, visible


def followed(backend: str) -> dict[str, Any]:
    """An eager step with that input through a backend of that name."""
    import os

    import torch
    from mla_rig import Rig

    os.environ["TREEVERIFY_TRITON"] = "1"
    try:
        rig = Rig(attention_backend=backend, speculative_eagle_topk=TOPK, speculative_num_draft_tokens=N)
        attention = rig.backend()
    finally:
        del os.environ["TREEVERIFY_TRITON"]
    attention.init_cuda_graph_state(2, 2 * N)
    step = rig.step([5, 70], N)
    made, step.visible = _drafted(step.prefixes, attention)
    batch = step.forward_batch("eagle")
    batch.spec_info, batch.seq_lens_sum, batch.seq_lens_cpu = made, None, None
    attention.init_forward_metadata(batch)
    if backend == "triton":
        q, k = torch.cat([step.q_nope, step.q_rope], -1), torch.cat([step.k, step.k_rope], -1)
        out = attention.forward_extend(q, k, step.k, rig.layer, batch)
    else:
        out = step.attend(attention, batch)
    branches = int((made.retrieve_next_sibling >= 0).sum())
    return {**step.found(out), "mask": made.custom_mask.numel(), "branches": branches}


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_mask_of_the_draft_alone_is_followed(patched: Worker, backend: str) -> None:
    got = patched(followed, backend=backend)
    assert got["mask"] == 2 * N * N and got["branches"] > 0, got
    assert got["tree"] <= BF16 and got["causal"] > WRONG and got["kv"], got


def stock_mask() -> int:
    """Elements of the mask that EAGLE builds for stock FlashInfer."""
    from mla_rig import CONTEXT, Rig

    rig = Rig(speculative_eagle_topk=TOPK, speculative_num_draft_tokens=N)
    made, _ = _drafted([5, 70], rig.backend())
    assert CONTEXT > 70
    return int(made.custom_mask.numel())


def test_stock_builds_the_prefix_s_columns_too(stock: Worker) -> None:
    assert stock(stock_mask) == 2 * N * (192 + N)
