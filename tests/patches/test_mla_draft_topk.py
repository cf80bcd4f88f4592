# SPDX-License-Identifier: Apache-2.0
"""An MLA drafter with topk > 1 gets draft steps that take several branches and q and k in two parts."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker


def kind_of(topk: int) -> dict[str, Any]:
    """What the factory makes for a drafter on the flashinfer backend."""
    import torch
    from mla_draft import draft_factory

    _, factory = draft_factory(topk, torch.float16, "cpu")
    try:
        backend = factory.create_decode_backend()
    except ValueError as error:
        return {"refused": str(error)}
    return {"class": type(backend).__name__, "steps": [type(step).__name__ for step in backend.attn_backends]}


def test_stock_refuses_topk_above_one(stock: Worker) -> None:
    assert "topk=1" in stock(kind_of, topk=4)["refused"]


def test_topk_above_one_drafts_on_triton(patched: Worker) -> None:
    assert patched(kind_of, topk=4) == {"class": "MLATritonMultiStepDraftBackend", "steps": ["MLADraftStep"] * 2}


def test_chain_keeps_flashinfer(patched: Worker) -> None:
    assert patched(kind_of, topk=1)["class"] == "FlashInferMLAMultiStepDraftBackend"


def step(split: bool) -> dict[str, float]:
    """One draft step under Triton's interpreter, which multiplies float16 but no bfloat16."""
    import torch
    from mla_draft import draft_step

    return draft_step(split, torch.float16, "cpu")


@pytest.mark.parametrize("split", [True, False])
def test_draft_step_reads_its_own_branch(patched: Worker, split: bool) -> None:
    got = patched(step, split=split)
    assert got["own"] <= 1e-2, got
    assert got["crossed"] > 0.05, "the check cannot tell one branch from another"
