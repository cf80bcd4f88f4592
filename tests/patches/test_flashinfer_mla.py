# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's MLA backend verifies by the mask, eager, captured and replayed, and its gates."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

BF16 = 5e-3
WRONG = 0.05
"""A mask that is not honoured moves some row of these inputs by far more than this."""


def eager(
    kind: str, prefixes: list[int], n: int, chain: bool = False, split: bool = True, **args: Any
) -> dict[str, Any]:
    """One eager step through the real hooks, against the tree and against a causal mask."""
    from mla_rig import Rig

    algorithm = {"eagle": "EAGLE", "dflash": "DFLASH"}.get(kind, "NGRAM")
    rig = Rig(**{"speculative_algorithm": algorithm, "speculative_num_draft_tokens": n, **args})
    if not split:
        rig.layer.logit_cap = 30.0
    step, backend = rig.step(prefixes, n, chain=chain), rig.backend()
    batch = step.forward_batch(kind)
    backend.init_forward_metadata(batch)
    out = step.attend(backend, batch, split)
    return {
        **step.found(out),
        "planned": any(w.planned is not None for w in (backend.prefill_wrapper_verify, backend.prefill_wrapper_paged)),
    }


@pytest.mark.parametrize("kind", ["eagle", "ngram", "ngram_qlen"])
@pytest.mark.parametrize("prefixes, n", [([5, 0, 70], 8), ([33], 3), ([1, 120], 65)])
def test_eager_step_follows_the_tree(patched: Worker, kind: str, prefixes: list[int], n: int) -> None:
    got = patched(eager, kind=kind, prefixes=prefixes, n=n)
    assert got["tree"] <= BF16, got
    assert got["causal"] > WRONG, "the check cannot tell a tree from a chain"
    assert got["kv"] and not got["planned"] and got["shape"] == [len(prefixes) * n, 4 * 512]


@pytest.mark.ddtree
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_slots_in_pages(patched: Worker, page_size: int) -> None:
    """Trees and chains of DDTREE and DFLASH, whose slots lie page by page; the kernels read them one by one."""
    tree = patched(
        eager, kind="ngram_qlen", prefixes=[5, 0, 70], n=8, speculative_algorithm="DDTREE", page_size=page_size
    )
    assert tree["tree"] <= BF16 and tree["causal"] > WRONG and tree["kv"] and not tree["planned"], tree
    chain = patched(
        eager, kind="dflash", prefixes=[15, 16, 64], n=8, chain=True, speculative_eagle_topk=1, page_size=page_size
    )
    assert chain["causal"] <= BF16 and chain["kv"] and not chain["planned"], chain


def test_joined_q_and_logit_cap(patched: Worker) -> None:
    got = patched(eager, kind="eagle", prefixes=[9, 40], n=6, split=False)
    assert got["tree"] <= BF16 and got["causal"] > WRONG and got["kv"], got


def test_dflash_without_mask_is_causal(patched: Worker) -> None:
    got = patched(eager, kind="dflash", prefixes=[12, 3], n=8, chain=True, speculative_eagle_topk=1)
    assert got["causal"] <= BF16 and not got["planned"], got


def mask_dropped() -> dict[str, Any]:
    """The same step with the test's own switch on: the mask must now be missing."""
    import os

    os.environ["TREEVERIFY_DROP_MASK_FOR_TEST"] = "1"
    try:
        return eager("eagle", [5, 0, 70], 8)
    finally:
        del os.environ["TREEVERIFY_DROP_MASK_FOR_TEST"]


def test_dropped_mask_is_seen(patched: Worker) -> None:
    got = patched(mask_dropped)
    assert got["tree"] > WRONG and got["causal"] <= BF16, got


def stock_plan() -> dict[str, Any]:
    """What the released code hands to FlashInfer for a tree: the arguments of plan()."""
    import torch
    from mla_rig import Rig

    rig = Rig()
    step, backend = rig.step([5, 70], 8), rig.backend()
    batch = step.forward_batch("eagle")
    backend.init_forward_metadata(batch)
    planned = backend.prefill_wrapper_verify.planned
    tensors = [a for a in planned if isinstance(a, torch.Tensor)]
    return {
        "masks": sum(t.dtype in (torch.bool, torch.uint8) for t in tensors),
        "causal": planned[8],
        "hooked": hasattr(backend, "tree_verify"),
    }


def test_stock_drops_the_mask(stock: Worker) -> None:
    assert stock(stock_plan) == {"masks": 0, "causal": True, "hooked": False}


def graph(raw: list[int], bs: int, n: int, kind: str) -> dict[str, Any]:
    """Captures a bucket, replays it twice: with other requests first, then with `raw` and padded rows."""
    import torch
    from mla_rig import Rig, causal, worst_row

    rig = Rig(speculative_num_draft_tokens=n, speculative_algorithm="EAGLE" if kind == "eagle" else "NGRAM")
    backend = rig.backend()
    backend.init_cuda_graph_state(bs, bs * n)
    rows = torch.zeros(bs, dtype=torch.int64)
    lens = torch.ones(bs, dtype=rig.release.SEQ_LENS)
    rig.release.capture(backend, bs, n, rows, lens)
    captured = backend.forward_metadata
    addresses = [t.data_ptr() for t in (captured.kv_indptr, captured.kv_indices, captured.mask, captured.workspace)]

    def replay(prefixes: list[int]) -> tuple[Any, Any]:
        step = rig.step(prefixes, n)
        real = len(prefixes)
        rows[:real], lens[:real] = step.req_pool_indices, step.seq_lens
        lens[real:] = 1
        rig.release.replay(backend, rows, lens, real, sum(prefixes) + bs - real, step.spec_info(kind))
        padding = bs * n - real * n
        batch = step.forward_batch(kind)
        batch.out_cache_loc = torch.cat([step.out_cache_loc, torch.zeros(padding, dtype=torch.int64)])
        backend.forward_metadata = captured  # a replay runs the captured kernels, whatever ran in between
        return step, step.padded(padding).attend(backend, batch)

    replay([20] * bs)
    step, out = replay(raw)
    real = len(raw) * n
    now = [t.data_ptr() for t in (captured.kv_indptr, captured.kv_indices, captured.mask, captured.workspace)]
    return {
        "tree": worst_row(out[:real], step.expected()),
        "causal": worst_row(out[:real], step.expected(causal(len(raw), n))),
        "padding": float(out[real:].abs().max()) if out.shape[0] > real else 0.0,
        "fixed": addresses == now,
        "shared": backend.cuda_graph_kv_indices.data_ptr() == captured.kv_indices.data_ptr(),
        "metadata": type(captured).__name__,
    }


@pytest.mark.parametrize("kind", ["eagle", "ngram_qlen"])
@pytest.mark.parametrize("raw, bs, n", [([9, 44, 0], 4, 8), ([7], 1, 65), ([3, 5], 2, 2)])
def test_replay_follows_the_tree_and_clears_padding(
    patched: Worker, kind: str, raw: list[int], bs: int, n: int
) -> None:
    got = patched(graph, raw=raw, bs=bs, n=n, kind=kind)
    assert got["tree"] <= BF16, got
    assert n == 2 or got["causal"] > WRONG, got
    assert got["padding"] == 0.0 and got["fixed"] and got["shared"] and got["metadata"] == "VerifyMetadata", got


def planned(deterministic: bool) -> dict[str, Any]:
    """A ragged eager step and a replay of its bucket with TREEVERIFY_PLAN=1: who got how many splits."""
    import logging
    import os

    import torch
    from mla_rig import Rig, worst_row

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.srt.treeverify").addHandler(handler)
    os.environ["TREEVERIFY_PLAN"] = "1"
    try:
        rig = Rig(enable_deterministic_inference=deterministic, context=1000)
        backend = rig.backend()
    finally:
        del os.environ["TREEVERIFY_PLAN"]
    step = rig.step([5, 900, 70], 8)
    batch = step.forward_batch("eagle")
    backend.init_forward_metadata(batch)
    eager = backend.forward_metadata
    tree = worst_row(step.attend(backend, batch), step.expected())
    backend.init_cuda_graph_state(4, 32)
    rows, lens = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=rig.release.SEQ_LENS)
    rig.release.capture(backend, 4, 8, rows, lens)
    captured = backend.forward_metadata
    rows[:3], lens[:3] = step.req_pool_indices, step.seq_lens
    rig.release.replay(backend, rows, lens, 3, 976, step.spec_info("eagle"))

    def shares(metadata: Any) -> list[int] | None:
        if metadata.split_indptr is None:
            return None
        starts, order = metadata.split_indptr[: 2 * metadata.bs + 1].split([metadata.bs + 1, metadata.bs])
        return starts.diff()[order.argsort()].tolist()

    return {"tree": tree, "eager": shares(eager), "replay": shares(captured), "heard": heard}


def test_a_plan_shares_splits_by_length(patched: Worker) -> None:
    got = patched(planned, deterministic=False)
    assert got["tree"] <= BF16, got
    assert got["eager"] == [1, 15, 2] and got["replay"] == [1, 15, 2, 1], got


def test_no_plan_in_deterministic_mode(patched: Worker) -> None:
    got = patched(planned, deterministic=True)
    assert got["tree"] <= BF16 and got["eager"] is None and got["replay"] is None, got
    assert any("TREEVERIFY_PLAN has no effect" in line for line in got["heard"]), got


def gate(**case: Any) -> str:
    """Either served or stock, or the text of the refusal, for a runner with these server arguments."""
    import os

    import torch
    from mla_rig import Rig

    kv, path = case.pop("kv", None), case.pop("path", "auto")
    skip_prefill, draft = case.pop("skip_prefill", False), case.pop("draft", False)
    rig = Rig(getattr(torch, case.pop("dtype", "bfloat16")), is_draft_worker=draft, **case)
    if kv:
        rig.runner.kv_cache_dtype = getattr(torch, kv)
    os.environ["TREEVERIFY_PATH"] = path
    try:
        backend = rig.backend(skip_prefill=skip_prefill)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["TREEVERIFY_PATH"]
    return "stock" if getattr(backend, "tree_verify", None) is None else "served"


CHAIN: dict[str, Any] = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}


@pytest.mark.parametrize(
    "case, outcome",
    [
        ({}, "served"),
        (CHAIN, "served"),
        ({"speculative_algorithm": "DFLASH", "speculative_eagle_topk": 1}, "served"),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 1}, "served"),
        ({"speculative_algorithm": None}, "stock"),
        ({"draft": True}, "stock"),
        ({"skip_prefill": True}, "stock"),
        ({"decode_attention_backend": "flashmla", "speculative_attention_mode": "decode"}, "stock"),
        ({"prefill_attention_backend": "triton", "speculative_attention_mode": "decode"}, "served"),
        ({**CHAIN, "kv": "float8_e4m3fn"}, "served"),
        ({"kv": "float8_e5m2"}, "served"),
        ({**CHAIN, "kv": "float32"}, "stock"),
        ({**CHAIN, "enable_two_batch_overlap": True}, "stock"),
        ({**CHAIN, "enable_pdmux": True}, "stock"),
        ({**CHAIN, "page_size": 64}, "served"),
        pytest.param({"speculative_algorithm": "DDTREE", "page_size": 64}, "served", marks=pytest.mark.ddtree),
        ({**CHAIN, "heads": 129}, "stock"),
        ({"heads": 128}, "served"),
        ({"path": "portable"}, "served"),
    ],
)
def test_gate(patched: Worker, case: dict[str, Any], outcome: str) -> None:
    assert patched(gate, **case) == outcome


@pytest.mark.parametrize(
    "case, words",
    [
        ({"kv": "float32"}, ["float32", "--kv-cache-dtype"]),
        ({"kv": "float8_e4m3fn", "dtype": "float16"}, ["float8_e4m3fn", "float16", "under a bfloat16 model"]),
        ({"enable_two_batch_overlap": True}, ["--enable-two-batch-overlap"]),
        ({"enable_pdmux": True}, ["--enable-pdmux"]),
        ({"page_size": 64}, ["page size 64", "--page-size 1"]),
        ({"speculative_algorithm": "NGRAM", "page_size": 16}, ["page size 16", "--page-size 1"]),
        ({"speculative_num_draft_tokens": 257}, ["257", "256", "--speculative-num-draft-tokens"]),
        ({"speculative_algorithm": "NGRAM", "kv": "float16"}, ["NGRAM", "float16"]),
        ({"heads": 129}, ["129 query heads", "1 .. 128", "--tp-size"]),
        ({"path": "fast"}, ["TREEVERIFY_PATH=fast", "portable", "hopper"]),
    ],
)
def test_tree_is_refused_with_reason_and_way_out(patched: Worker, case: dict[str, Any], words: list[str]) -> None:
    said = patched(gate, **case)
    chain = "another algorithm" if case.get("speculative_algorithm") == "NGRAM" else "topk 1"
    assert said.startswith("treeverify:") and all(word in said for word in [*words, chain]), said


def subclass_gate(algorithm: str, topk: int) -> str:
    """A backend that derives from FlashInferMLAAttnBackend, as FlashMLA's does, under its own name."""
    from mla_rig import Rig

    rig = Rig(speculative_algorithm=algorithm, speculative_eagle_topk=topk, attention_backend="flashmla")
    try:
        return "served" if rig.release.flashmla_is_served(rig) else "stock"
    except ValueError as error:
        return str(error)


def test_subclass_keeps_its_chain_and_refuses_a_tree(patched: Worker) -> None:
    assert patched(subclass_gate, algorithm="EAGLE", topk=1) == "stock"
    assert "flashmla" in patched(subclass_gate, algorithm="NGRAM", topk=4)


def disabled() -> dict[str, Any]:
    """With TREEVERIFY_DISABLE the stock lines run: plan() is called, the mask is not passed on, a warning says so."""
    import logging
    import os

    from mla_rig import Rig

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.srt.treeverify").addHandler(handler)
    os.environ["TREEVERIFY_DISABLE"] = "1"
    try:
        rig = Rig()
        backend = rig.backend()
        batch = rig.step([5, 70], 8).forward_batch("eagle")
        backend.init_forward_metadata(batch)
    finally:
        del os.environ["TREEVERIFY_DISABLE"]
    stock = getattr(backend, "tree_verify", None) is None
    return {"stock": stock, "planned": backend.prefill_wrapper_verify.planned[8], "heard": heard}


def test_disable_switch_is_stock_and_says_what_that_means(patched: Worker) -> None:
    got = patched(disabled)
    assert got["stock"] and got["planned"] is True
    assert any("DROP" in line for line in got["heard"]), got


def late_mask() -> dict[str, Any]:
    """An overlap plan stream prepares a step before its mask is final: refresh() must read the final one."""
    from mla_rig import Rig, causal, worst_row

    rig = Rig()
    step, backend = rig.step([5, 70], 8), rig.backend()
    batch = step.forward_batch("eagle")
    final = batch.spec_info.custom_mask
    batch.spec_info.custom_mask = final.clone().fill_(True)
    backend.init_forward_metadata(batch)
    early = worst_row(step.attend(backend, batch), step.expected())
    batch.spec_info.custom_mask = final
    backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    return {"early": early, "final": worst_row(step.attend(backend, batch), step.expected()), "n": len(causal(1, 8))}


def test_mask_written_after_the_plan_is_the_one_used(patched: Worker) -> None:
    got = patched(late_mask)
    assert got["early"] > WRONG and got["final"] <= BF16, got


def short_mask(numel: int) -> str:
    """A tree's mask that does not cover its batch."""
    from mla_rig import Rig

    rig = Rig()
    backend, batch = rig.backend(), rig.step([5, 70], 8).forward_batch("eagle")
    batch.spec_info.custom_mask = batch.spec_info.custom_mask[:numel]
    try:
        backend.init_forward_metadata(batch)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_short_tree_mask_is_an_error_not_a_chain(patched: Worker) -> None:
    full = 8 * (5 + 70 + 16)
    assert patched(short_mask, numel=full) == "accepted"
    assert str(full) in patched(short_mask, numel=full - 1)


def dp_padding(extra: int) -> dict[str, Any]:
    """DP attention pads the batch and its tokens: padded requests and stray rows must come out as 0."""
    import torch
    from mla_rig import Rig, worst_row

    rig = Rig()
    step, backend = rig.step([5, 70], 8), rig.backend()
    batch = step.forward_batch("eagle")
    pad = 8 + extra
    batch._original_batch_size, batch.batch_size = 2, 3
    batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(1, dtype=torch.int64)])
    batch.seq_lens_cpu = torch.cat([batch.seq_lens_cpu, torch.ones(1, dtype=torch.int64)])
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(1, dtype=torch.int64)])
    batch.input_ids = torch.zeros(16 + pad, dtype=torch.int64)
    backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.cat([step.out_cache_loc, torch.zeros(pad, dtype=torch.int64)])
    out = step.padded(pad).attend(backend, batch)
    return {"tree": worst_row(out[:16], step.expected()), "padding": float(out[16:].abs().max()), "rows": out.shape[0]}


@pytest.mark.parametrize("extra", [0, 3])
def test_dp_attention_padding_is_zero(patched: Worker, extra: int) -> None:
    got = patched(dp_padding, extra=extra)
    assert got["tree"] <= BF16 and got["padding"] == 0.0 and got["rows"] == 24 + extra, got
