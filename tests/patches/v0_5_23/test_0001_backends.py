# SPDX-License-Identifier: Apache-2.0
"""0001: which backend a runner of this release gets, by the settings in effect and by how its pool names KV slots."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

BF16 = 5e-3


def chosen(name: str = "flashinfer", mla: bool = True, renamed: bool = False, **args: Any) -> str:
    """The class that serves, "stock", or the text of a refusal."""
    from mla_rig import Rig
    from sglang.srt.treeverify.attention import choice

    rig = Rig(attention_backend=name, **args)
    rig.runner.use_mla_backend = mla
    rig.runner.kv_index_translator.is_translating = renamed
    try:
        found = choice.verifying(name, rig.runner)
    except ValueError as error:
        return str(error)
    return "stock" if found is None else str(found.__name__)


@pytest.mark.parametrize("name", ["flashmla", "cutlass_mla", "trtllm_mla", "cutedsl_mla"])
def test_backends_that_drop_masks_refuse_trees_and_keep_chains(patched: Worker, name: str) -> None:
    said = patched(chosen, name=name)
    assert f"cannot be verified by its mask on the {name} MLA backend" in said and "flashinfer" in said
    assert patched(chosen, name=name, speculative_eagle_topk=1) == "stock"
    assert patched(chosen, name=name, mla=False) == "stock"


CHAIN: dict[str, Any] = {"speculative_eagle_topk": 1}


@pytest.mark.parametrize(
    "case, outcome",
    [
        ({}, "FlashInferMLAVerifyBackend"),
        ({"name": "triton"}, "TritonMLAVerifyBackend"),
        ({"mla": False}, "stock"),
        ({"name": "fa3"}, "stock"),
        ({"speculative_algorithm": "DSPARK", **CHAIN}, "stock"),
        ({"speculative_algorithm": "UNO", **CHAIN}, "stock"),
        ({"name": "triton", "speculative_algorithm": "UNO"}, "stock"),
        ({"dcp_size": 2, **CHAIN}, "stock"),
        ({"renamed": True, **CHAIN}, "stock"),
        ({"renamed": True, "name": "triton"}, "stock"),
    ],
)
def test_what_is_served(patched: Worker, case: dict[str, Any], outcome: str) -> None:
    assert patched(chosen, **case) == outcome


@pytest.mark.parametrize(
    "case, words",
    [
        ({"dcp_size": 2}, "--dcp-size spreads a request's KV over GPUs. Drop --dcp-size"),
        ({"renamed": True}, "KV slots other numbers in the pool. Drop --enable-unified-memory"),
        ({"speculative_algorithm": "UNO"}, "UNO drafts with the target's own layers"),
    ],
)
def test_trees_are_refused_with_reason_and_way_out(patched: Worker, case: dict[str, Any], words: str) -> None:
    assert words in patched(chosen, **case)


def typed() -> list[Any]:
    """The algorithm as the user typed it, and as it is in effect."""
    from mla_rig import Rig
    from sglang.srt.treeverify import compat

    runner = Rig(speculative_algorithm="EAGLE").runner
    return [runner.server_args.speculative_algorithm, compat.settings(runner).speculative_algorithm]


def test_what_is_in_effect_counts_not_what_was_typed(patched: Worker) -> None:
    assert patched(typed) == [None, "EAGLE"]


def names() -> list[list[str | None]]:
    """Under which names the steps of an MLA drafter with topk > 1 meet the model."""
    import torch
    from mla_draft import draft_factory

    _, factory = draft_factory(4, torch.float16, "cpu")
    backend = factory.create_decode_backend()
    return [[step.decode_attention_backend_str, type(step).__name__] for step in backend.attn_backends]


def test_the_model_hands_draft_steps_q_and_k_as_triton_takes_them(patched: Worker) -> None:
    assert patched(names) == [["triton", "TritonAttnBackend"]] * 2


def overrated(known: bool) -> dict[str, float]:
    """DFLASH's worker hands over host lengths with the block in them; or there are none. Eager, then a replay."""
    from mla_rig import Rig, causal, worst_row

    prefixes, n, bs = [12, 3], 8, 3
    rig = Rig(speculative_algorithm="DFLASH", speculative_num_draft_tokens=n, speculative_eagle_topk=1)
    backend = rig.backend()
    step = rig.step(prefixes, n, chain=True)
    batch = step.forward_batch("dflash")
    batch.seq_lens_cpu = step.seq_lens_cpu + n if known else None
    batch.seq_lens_sum = sum(prefixes) + 2 * n if known else None
    backend.init_forward_metadata(batch)
    eager = worst_row(step.attend(backend, batch), step.expected(causal(2, n)))
    backend.init_cuda_graph_state(bs, bs * n)
    runner = rig.graph_runner(backend, bs, n)
    rig.release.runner_captures(runner)
    rig.release.runner_replays(runner, batch)
    batch.out_cache_loc = runner.buffers.out_cache_loc
    out = step.padded(n).attend(backend, batch)
    lengths = [float(length) for length in backend.forward_metadata.kv_indptr[: bs + 1].diff()]
    return {
        "eager": eager,
        "replay": worst_row(out[: 2 * n], step.expected(causal(2, n))),
        "wrong lengths": float(lengths != [p + n for p in prefixes] + [0.0]),
        "padding": float(out[2 * n :].abs().max()),
    }


@pytest.mark.parametrize("known", [True, False])
def test_lengths_come_from_the_device(patched: Worker, known: bool) -> None:
    got = patched(overrated, known=known)
    assert got["eager"] <= BF16 and got["replay"] <= BF16, got
    assert got["wrong lengths"] == got["padding"] == 0.0, got
