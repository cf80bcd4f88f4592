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

    rig, factory = draft_factory(topk, torch.float16, "cpu")
    try:
        backend = factory.create_decode_backend()
    except ValueError as error:
        return {"refused": str(error)}
    found = {"class": type(backend).__name__, "steps": [type(step).__name__ for step in backend.attn_backends]}
    return {**found, "expected": rig.release.DRAFTS_BRANCHES}


def test_stock_refuses_topk_above_one(stock: Worker) -> None:
    assert "topk=1" in stock(kind_of, topk=4)["refused"]


def test_topk_above_one_drafts_on_triton(patched: Worker) -> None:
    got = patched(kind_of, topk=4)
    assert [got["class"], *got["steps"]] == [got["expected"][0], *[got["expected"][1]] * 2], got


def test_chain_keeps_flashinfer(patched: Worker) -> None:
    assert patched(kind_of, topk=1)["class"] == "FlashInferMLAMultiStepDraftBackend"


def step(split: bool) -> dict[str, float]:
    """One draft step under Triton's interpreter, which multiplies float16 but no bfloat16."""
    import torch
    from mla_draft import draft_step

    return draft_step(split, torch.float16, "cpu")


def _reads_its_own_branch(got: dict[str, float]) -> None:
    assert got["own"] <= 1e-2, got
    assert got["crossed"] > 0.05, "the check cannot tell one branch from another"


def test_draft_step_reads_its_own_branch(patched: Worker) -> None:
    _reads_its_own_branch(patched(step, split=False))


@pytest.mark.pin("v0.5.12.post1", "v0.5.17")
def test_draft_step_takes_q_and_k_in_two_parts(patched: Worker) -> None:
    """The model hands them over as flashinfer takes them; later releases ask the step's backend for its name."""
    _reads_its_own_branch(patched(step, split=True))
