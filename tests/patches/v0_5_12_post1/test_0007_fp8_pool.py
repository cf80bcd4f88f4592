# SPDX-License-Identifier: Apache-2.0
"""0007: FlashInferMLAAttnBackend reads an fp8 pool as it is: verify, decode, and the cached prefix of a prefill."""

from __future__ import annotations

from typing import Any

import pytest
from worker import Worker

BF16 = 5e-3
KINDS = ["float8_e4m3fn", "float8_e5m2"]


class Widest:
    """The elements of the largest tensor that an operator made while it was entered: views make none."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        widest = self
        self.numel = 0

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                import torch

                out = func(*args, **(kwargs or {}))
                seen = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
                for t in out if isinstance(out, (tuple, list)) else [out]:
                    if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in seen:
                        widest.numel = max(widest.numel, t.numel())
                return out

        self._mode = Mode()

    def __enter__(self) -> Widest:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)


def _rig(kv: str, **args: Any) -> Any:
    """A rig whose pool is larger than anything a pass over its few tokens needs."""
    import torch
    from mla_rig import Rig

    return Rig(kv_dtype=getattr(torch, kv), context=1000, **args)


def _decode_batch(rig: Any, step: Any) -> Any:
    """The step's ForwardBatch as one of plain decode: lengths count the new token, as SGLang's do."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = step.forward_batch("dflash")
    batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None
    batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + 1, batch.seq_lens_cpu + 1
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    return batch


def _decode(step: Any, backend: Any, batch: Any, split: bool = True) -> Any:
    """forward_decode of the layer: [T, H * 512]."""
    import torch

    if split:
        parts = {"q_rope": step.q_rope, "k_rope": step.k_rope}
        return backend.forward_decode(step.q_nope, step.k, step.k, step.rig.layer, batch, **parts)
    q, k = torch.cat([step.q_nope, step.q_rope], -1), torch.cat([step.k, step.k_rope], -1)
    return backend.forward_decode(q.flatten(1), k, step.k, step.rig.layer, batch)


def verify(kv: str, prefixes: list[int], n: int) -> dict[str, Any]:
    rig = _rig(kv, speculative_algorithm="EAGLE", speculative_num_draft_tokens=n)
    step, backend = rig.step(prefixes, n), rig.backend()
    batch = step.forward_batch("eagle")
    with Widest() as widest:
        backend.init_forward_metadata(batch)
        out = step.attend(backend, batch)
    return {**step.found(out), "whole": widest.numel >= rig.pool.kv_buffer[0].numel()}


@pytest.mark.parametrize("kv", KINDS)
def test_verify_follows_the_tree(patched: Worker, kv: str) -> None:
    got = patched(verify, kv=kv, prefixes=[5, 0, 70], n=8)
    assert got["tree"] <= BF16 and got["causal"] > 10 * BF16 and got["kv"] and not got["whole"], got


def decode(kv: str, prefixes: list[int], split: bool = True, cap: float = 0.0) -> dict[str, Any]:
    rig = _rig(kv, speculative_algorithm=None)
    rig.layer.logit_cap = cap
    step, backend = rig.step(prefixes, 1), rig.backend()
    batch = _decode_batch(rig, step)
    with Widest() as widest:
        backend.init_forward_metadata(batch)
        out = _decode(step, backend, batch, split)
    return {
        **step.found(out),
        "whole": widest.numel >= rig.pool.kv_buffer[0].numel(),
        "planned": backend.decode_wrapper.planned is not None,
    }


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("split, cap", [(True, 0.0), (False, 30.0)])
def test_decode(patched: Worker, kv: str, split: bool, cap: float) -> None:
    got = patched(decode, kv=kv, prefixes=[5, 0, 700], split=split, cap=cap)
    assert got["causal"] <= BF16 and got["kv"] and not got["whole"] and not got["planned"], got
    assert got["shape"] == [3, 4 * 512]


def decode_graph(raw: list[int], bs: int, eager_between: bool) -> dict[str, Any]:
    """Captures two buckets, replays the larger one with other requests first, then with `raw` and padded rows."""
    import torch
    from mla_rig import worst_row
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig = _rig("float8_e4m3fn", speculative_algorithm=None)
    backend, mode = rig.backend(), ForwardMode.DECODE
    backend.init_cuda_graph_state(bs, bs, kv_indices_buf=torch.zeros(bs * 1000, dtype=torch.int32))
    rows, lens = torch.zeros(bs, dtype=torch.int64), torch.ones(bs, dtype=torch.int32)
    backend.init_forward_metadata_capture_cuda_graph(bs, bs, rows, lens, None, mode, None)
    captured = backend.forward_metadata
    backend.init_forward_metadata_capture_cuda_graph(1, 1, rows[:1], lens[:1], None, mode, None)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "workspace")
    addresses = [getattr(captured, name).data_ptr() for name in names]

    def replay(prefixes: list[int]) -> tuple[Any, Any]:
        step = rig.step(prefixes, 1)
        batch = _decode_batch(rig, step)
        real = len(prefixes)
        rows[:real], lens[:real], lens[real:] = step.req_pool_indices, batch.seq_lens.int(), 1
        padding = torch.ones(bs - real, dtype=torch.int64)
        cpu, total = torch.cat([batch.seq_lens_cpu, padding]), batch.seq_lens_sum + bs - real
        if eager_between:
            other = rig.step([3], 1)
            backend.init_forward_metadata(_decode_batch(rig, other))
        backend.init_forward_metadata_replay_cuda_graph(bs, rows, lens, total, None, mode, None, seq_lens_cpu=cpu)
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, 0 * padding])
        backend.forward_metadata = captured  # a replay runs the captured kernels, whatever ran in between
        return step, _decode(step.padded(bs - real), backend, batch)

    replay([20] * bs)
    step, out = replay(raw)
    return {
        "error": worst_row(out[: len(raw)], step.expected()),
        "fixed": addresses == [getattr(captured, name).data_ptr() for name in names],
        "rows": out.shape[0],
    }


@pytest.mark.parametrize("raw, bs, eager_between", [([9, 44, 0], 4, False), ([800, 3], 2, True)])
def test_decode_replays(patched: Worker, raw: list[int], bs: int, eager_between: bool) -> None:
    got = patched(decode_graph, raw=raw, bs=bs, eager_between=eager_between)
    assert got["error"] <= BF16 and got["fixed"] and got["rows"] == bs, got


def prefill(prefixes: list[int], n: int, kv: str) -> dict[str, Any]:
    """An extend behind a cached prefix. FlashInfer's kernel is what the wrapper was planned for, written out."""
    import torch
    from mla_rig import worst_row
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig = _rig(kv, speculative_algorithm=None, disable_chunked_prefix_cache=True)
    step, backend = rig.step(prefixes, n, chain=True), rig.backend()
    batch = step.forward_batch("dflash")
    batch.forward_mode, batch.spec_info = ForwardMode.EXTEND, None
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = step.seq_lens.int(), prefixes
    batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + n, batch.seq_lens_cpu + n
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    heard: dict[str, Any] = {}

    def run(q: Any, q_rope: Any, ckv: Any, kpe: Any, out: Any) -> Any:
        qo_indptr, kv_indptr, kv_indices = backend.prefill_wrapper_paged.planned[:3]
        heard.update(rows=ckv.shape[0], dtype=str(ckv.dtype), indices=kv_indices.tolist())
        for b in range(step.bs):
            mine = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
            keys = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
            query = torch.cat([q[mine], q_rope[mine]], -1).double()
            key = torch.cat([ckv[keys], kpe[keys]], -1)[:, 0].double()
            score = torch.einsum("qhd,kd->hqk", query, key) * rig.layer.scaling
            seen = torch.ones(n, len(keys), dtype=torch.bool).tril(len(keys) - n)
            weight = torch.softmax(score.masked_fill(~seen, float("-inf")), -1)
            out[mine] = torch.einsum("hqk,kd->qhd", weight, key[:, :512]).to(out.dtype)
        return out

    backend.prefill_wrapper_paged.run = run
    with Widest() as widest:
        backend.init_forward_metadata(batch)
        out = step.attend(backend, batch)
    return {
        "error": worst_row(out, step.expected()),
        "whole": widest.numel >= rig.pool.kv_buffer[0].numel(),
        "pool": rig.pool.kv_buffer[0].shape[0],
        "total": batch.seq_lens_sum,
        **heard,
    }


@pytest.mark.parametrize("kv", KINDS)
def test_prefill_casts_the_rows_it_attends_to(patched: Worker, kv: str) -> None:
    got = patched(prefill, prefixes=[40, 300], n=6, kv=kv)
    assert got["error"] <= BF16 and not got["whole"] and got["dtype"] == "torch.bfloat16", got
    assert got["rows"] == got["total"] == 352 and got["indices"] == list(range(352))


def test_prefill_takes_the_whole_pool_where_its_rows_would_be_more(patched: Worker) -> None:
    """Requests that share a prefix name its slots once each."""
    got = patched(prefill, prefixes=[900] * 5, n=2, kv="float8_e4m3fn")
    assert got["error"] <= BF16 and got["rows"] == got["pool"] > got["total"] > got["pool"] // 2, got
    assert max(got["indices"]) > got["total"], got


def test_prefill_of_a_bf16_pool_is_the_stock_one(patched: Worker) -> None:
    got = patched(prefill, prefixes=[40, 300], n=6, kv="bfloat16")
    assert got["error"] <= BF16 and got["rows"] == got["pool"], got


def test_stock_casts_the_whole_pool(stock: Worker) -> None:
    """What the patch is there for, and that the check can tell."""
    got = stock(prefill, prefixes=[40, 300], n=6, kv="float8_e4m3fn")
    assert got["error"] <= BF16 and got["whole"] and got["rows"] == got["pool"], got


def gate(**case: Any) -> dict[str, Any]:
    """Whether a backend of such a runner reads the pool, and what the log says."""
    import logging
    import os

    import torch
    from mla_rig import Rig

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang.srt.treeverify")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    from sglang.srt.treeverify import gates

    gates._log_once.cache_clear()
    kv, dtype = getattr(torch, case.pop("kv", "float8_e4m3fn")), getattr(torch, case.pop("dtype", "bfloat16"))
    skip_prefill, subclass = case.pop("skip_prefill", False), case.pop("subclass", False)
    disabled = case.pop("disabled", "0")
    rig = Rig(dtype, kv_dtype=kv, **{"speculative_algorithm": None, **case})
    os.environ["TREEVERIFY_DISABLE"] = disabled
    try:
        kind = rig.module.FlashInferMLAAttnBackend
        backend = (type("FlashMLABackend", (kind,), {}) if subclass else kind)(rig.runner, skip_prefill=skip_prefill)
    finally:
        del os.environ["TREEVERIFY_DISABLE"]
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return {"reads": backend.fp8_pool is not None, "heard": heard}


@pytest.mark.parametrize(
    ("case", "reads", "words"),
    [
        ({}, True, "read the float8_e4m3fn pool as it is"),
        ({"kv": "float8_e5m2"}, True, "read the float8_e5m2 pool as it is"),
        ({"is_draft_worker": True}, True, "as it is"),
        ({"kv": "bfloat16"}, False, None),
        ({"dtype": "float16"}, False, "casts the whole float8_e4m3fn pool in every layer"),
        ({"heads": 129}, False, "129 query heads"),
        ({"enable_deterministic_inference": True}, False, "--enable-deterministic-inference"),
        ({"skip_prefill": True}, False, None),
        ({"subclass": True}, False, None),
        ({"disabled": "1"}, False, None),
    ],
)
def test_gate(patched: Worker, case: dict[str, Any], reads: bool, words: str | None) -> None:
    got = patched(gate, **case)
    assert got["reads"] is reads, got
    assert any(words in line for line in got["heard"]) if words else not got["heard"], got
