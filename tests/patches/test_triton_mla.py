# SPDX-License-Identifier: Apache-2.0
"""TritonAttnBackend of an MLA target verifies on treeverify's kernels; switched off, and all else, is stock's."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import emulator
import pytest
from worker import Worker

BF16 = 5e-3
WRONG = 0.05
"""A mask that is not honoured moves some row of these inputs by far more than this."""
NEEDS_DDTREE = pytest.mark.ddtree
DDTREE = pytest.param("ddtree", marks=NEEDS_DDTREE)


def _backend(rig: Any, on: bool = True, **kwargs: Any) -> Any:
    with patch.dict(os.environ, {} if on else {"TREEVERIFY_TRITON": "0"}):
        return rig.backend(**kwargs)


def _rig(kind: str, n: int, dtype: str = "bfloat16", **args: Any) -> Any:
    import torch
    from mla_rig import Rig

    algorithm = {"eagle": "EAGLE", "ngram": "NGRAM", "ngram_qlen": "NGRAM", "ddtree": "DDTREE"}.get(kind, "DFLASH")
    options = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": n, **args}
    return Rig(getattr(torch, dtype), attention_backend="triton", **options)


def _batch(step: Any, kind: str, backend: Any = None) -> Any:
    """The step's ForwardBatch with the verify input of `kind`: as test_0001's, DFLASH's with a mask, or DDTREE's."""
    if kind == "dflash_mask":
        batch = step.forward_batch("dflash")
        batch.spec_info.custom_mask = step.full_mask()
        return batch
    if kind != "ddtree":
        return step.forward_batch(kind)
    import torch
    from sglang.srt.treeverify.attention.reference import pack_mask
    from sglang.srt.treeverify.ddtree.masks import form_for
    from sglang.srt.treeverify.ddtree.tree import DraftTree
    from sglang.srt.treeverify.ddtree.tree_input import TreeVerifyInput

    batch, bs, n = step.forward_batch("dflash"), step.bs, step.n
    longs, ints = torch.zeros(bs, n, dtype=torch.int64), torch.zeros(bs, n, dtype=torch.int32)
    mask = torch.stack([pack_mask(visible) for visible in step.visible])
    tree = DraftTree(longs, longs, ints, ints, mask, longs, longs, ints.float(), ints[:, 0] + n, n - 1)
    form = form_for(backend)
    batch.spec_info = TreeVerifyInput(None, None, n, tree=tree, mask_form=form)
    if form.name == "FULL":
        batch.spec_info.custom_mask = step.full_mask()
    return batch


def _extend(step: Any, backend: Any, batch: Any, q_layout: str = "joined", **kwargs: Any) -> Any:
    """forward_extend as forward_mla calls it on this backend: q [T, H, 576], k [T, 1, 576]."""
    import torch

    q = torch.cat([step.q_nope, step.q_rope], -1)
    if q_layout == "flat":
        q = q.flatten(1)
    elif q_layout == "strided":
        wide = q.new_full((q.shape[0], q.shape[1] + 1, q.shape[2] + 32), float("nan"))
        wide[:, :-1, : q.shape[2]] = q
        q = wide[:, :-1, : q.shape[2]]
    k = torch.cat([step.k, step.k_rope], -1)
    return backend.forward_extend(q, k, step.k, step.rig.layer, batch, **kwargs)


def eager(
    kind: str, prefixes: list[int], n: int, on: bool = True, dtype: str = "bfloat16", chain: bool = False,
    q_layout: str = "joined", **args: Any,
) -> dict[str, Any]:  # fmt: skip
    """One eager step, against the tree and against a causal mask."""

    rig = _rig(kind, n, dtype, **args)
    step, backend = rig.step(prefixes, n, chain=chain), _backend(rig, on)
    batch = _batch(step, kind, backend)
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    out = _extend(step, backend, batch, q_layout)
    return {
        **step.found(out),
        "metadata": type(metadata).__name__,
        "index": str(metadata.kv_indices.dtype),
        "form": batch.spec_info.mask_form.name if kind == "ddtree" else None,
    }


@pytest.mark.parametrize("kind", ["eagle", "ngram", "ngram_qlen", "dflash_mask", DDTREE])
@pytest.mark.parametrize("prefixes, n", [([5, 0, 70], 8), ([33], 3), ([1, 120], 65)])
def test_eager_step_follows_the_tree(patched: Worker, kind: str, prefixes: list[int], n: int) -> None:
    got = patched(eager, kind=kind, prefixes=prefixes, n=n)
    assert got["tree"] <= BF16, got
    assert got["causal"] > WRONG, "the check cannot tell a tree from a chain"
    assert got["kv"] and got["shape"] == [len(prefixes) * n, 4 * 512]
    assert got["metadata"] == "VerifyMetadata" and got["index"] == "torch.int64", got
    assert got["form"] == ("PACKED" if kind == "ddtree" else None)


@pytest.mark.parametrize("q_layout", ["flat", "strided"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_forms_of_q(patched: Worker, q_layout: str, dtype: str) -> None:
    got = patched(eager, kind="eagle", prefixes=[9, 40], n=6, q_layout=q_layout, dtype=dtype)
    assert got["tree"] <= BF16 and got["causal"] > WRONG and got["kv"], got


def test_dflash_without_mask_is_causal(patched: Worker) -> None:
    got = patched(eager, kind="dflash", prefixes=[12, 3], n=8, chain=True)
    assert got["causal"] <= BF16 and got["metadata"] == "VerifyMetadata", got


@pytest.mark.ddtree
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_slots_in_pages(patched: Worker, page_size: int) -> None:
    for kind, n in (("ddtree", 9), ("dflash", 8)):
        got = patched(
            eager, kind=kind, prefixes=[15, 0, 64], n=n, chain=kind == "dflash", page_size=page_size,
            speculative_eagle_topk=1,
        )  # fmt: skip
        assert got["tree"] <= BF16 and got["kv"] and got["metadata"] == "VerifyMetadata", got
        assert (got["causal"] > WRONG) is (kind == "ddtree"), got


@pytest.mark.parametrize("kind, form", [("eagle", None), pytest.param("ddtree", "FULL", marks=NEEDS_DDTREE)])
def test_off_is_triton_itself_and_still_follows_the_tree(patched: Worker, kind: str, form: str | None) -> None:
    got = patched(eager, kind=kind, prefixes=[5, 0, 70], n=8, on=False, dtype="float16")
    assert got["metadata"] == "ForwardMetadata" and got["form"] == form, got
    assert got["tree"] <= BF16 and got["causal"] > WRONG and got["kv"], got


def released(on: bool) -> list[float]:
    """A step's output, summed up exactly."""
    rig = _rig("eagle", 8, "float16")
    step, backend = rig.step([5, 70], 8), _backend(rig, on)
    batch = step.forward_batch("eagle")
    backend.init_forward_metadata(batch)
    out = _extend(step, backend, batch)
    return [float(row) for row in out.double().square().sum(-1)]


def test_off_equals_the_release_bit_for_bit(patched: Worker, stock: Worker) -> None:
    assert patched(released, on=False) == stock(released, on=False)
    assert patched(released, on=True) != stock(released, on=False), "the check cannot tell the two kernels apart"


def mask_dropped() -> dict[str, Any]:
    """A step with the test's own switch on: the mask must now be missing."""
    with patch.dict(os.environ, TREEVERIFY_DROP_MASK_FOR_TEST="1"):
        return eager("eagle", [5, 0, 70], 8)


def test_dropped_mask_is_seen(patched: Worker) -> None:
    got = patched(mask_dropped)
    assert got["tree"] > WRONG and got["causal"] <= BF16, got


def flipped(row: int, column: int) -> list[int]:
    """Rows of one request's output that change where one more node is visible to `row`."""
    rig = _rig("eagle", 8)
    step, backend = rig.step([30], 8), _backend(rig)
    outs = []
    for flip in (False, True):
        batch = step.forward_batch("eagle")
        if flip:
            bits = batch.spec_info.custom_mask.view(8, 38)
            bits[row, 30 + column] ^= True
        backend.init_forward_metadata(batch)
        outs.append(_extend(step, backend, batch))
    changed = (outs[0] != outs[1]).any(-1).nonzero().flatten().tolist()
    return [int(i) for i in changed]


@pytest.mark.parametrize("row, column", [(7, 3), (2, 6)])
def test_one_bit_changes_one_row(patched: Worker, row: int, column: int) -> None:
    assert patched(flipped, row=row, column=column) == [row]


def scaled(k_scale: float, kv: str) -> float:
    """A layer with a k_scale: Triton's writer divides by it."""
    import torch
    from mla_rig import worst_row

    rig = _rig("eagle", 8, kv_dtype=getattr(torch, kv))
    step, backend = rig.step([9, 40], 8), _backend(rig)
    rig.layer.k_scale = rig.layer.v_scale = torch.tensor(k_scale)
    rig.layer.k_scale_float = rig.layer.v_scale_float = k_scale
    expected = step.expected()  # of what earlier steps have written too, whatever that is
    batch = step.forward_batch("eagle")
    backend.init_forward_metadata(batch)
    return worst_row(_extend(step, backend, batch), expected)


@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_k_scale_is_applied_as_the_writer_stored_it(patched: Worker, kv: str) -> None:
    assert patched(scaled, k_scale=0.4, kv=kv) <= BF16


def replayed(kind: str, mode: str, prefixes: list[int], bs: int, n: int) -> dict[str, Any]:
    """replay_prepare of the real graph runner over a smaller batch than captured, after a fuller one.

    `mode`: this backend alone, or the verifying half of a hybrid (by speculative_attention_mode).
    """
    from mla_rig import causal, worst_row
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    rig = _rig(kind, n)
    outer = verifying = _backend(rig)
    if mode != "plain":
        rig.args.speculative_attention_mode, other = mode, _backend(rig, on=False)
        halves = (verifying, other) if mode == "prefill" else (other, verifying)
        outer = HybridAttnBackend(rig.runner, *halves)
    outer.init_cuda_graph_state(bs, bs * n)
    runner = rig.graph_runner(outer, bs, n)
    buffers = runner.buffers
    rig.release.runner_captures(runner)
    captured = verifying.forward_metadata
    tensors = (captured.kv_indptr, captured.kv_indices, captured.mask, captured.workspace)
    addresses = [t.data_ptr() for t in tensors]
    for now in ([20] * bs, prefixes):
        step = rig.step(now, n)
        batch = _batch(step, kind, outer)
        rig.release.runner_replays(runner, batch)
        buffers.req_pool_indices[len(now) :] = 7  # what an earlier, fuller replay may have left
    batch.out_cache_loc, verifying.forward_metadata = buffers.out_cache_loc, captured
    real = len(prefixes) * n
    out = _extend(step.padded(bs * n - real), verifying, batch)
    return {
        "tree": worst_row(out[:real], step.expected()),
        "causal": worst_row(out[:real], step.expected(causal(len(prefixes), n))),
        "padding": float(out[real:].abs().max()) if out.shape[0] > real else 0.0,
        "lengths": captured.kv_indptr[: bs + 1].diff().tolist(),
        "fixed": addresses == [t.data_ptr() for t in tensors],
        "index": str(captured.kv_indices.dtype),
    }


@pytest.mark.parametrize("kind", ["eagle", "ngram", "dflash_mask", DDTREE])
@pytest.mark.parametrize("prefixes, bs, n", [([9, 44], 4, 8), ([7], 1, 65)])
def test_replay_follows_the_tree_and_clears_padding(
    patched: Worker, kind: str, prefixes: list[int], bs: int, n: int
) -> None:
    got = patched(replayed, kind=kind, mode="plain", prefixes=prefixes, bs=bs, n=n)
    assert got["tree"] <= BF16 and got["causal"] > WRONG, got
    assert got["padding"] == 0.0 and got["fixed"] and got["index"] == "torch.int64", got
    assert got["lengths"] == [p + n for p in prefixes] + [0] * (bs - len(prefixes)), got


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_half_of_a_hybrid_verifies(patched: Worker, mode: str) -> None:
    got = patched(replayed, kind="eagle", mode=mode, prefixes=[9, 44], bs=4, n=8)
    assert got["tree"] <= BF16 and got["causal"] > WRONG and got["padding"] == 0.0, got


def late_mask() -> dict[str, Any]:
    """An overlap plan stream prepares a step before its mask is final, and asks where to write it."""
    from mla_rig import worst_row

    rig = _rig("eagle", 8)
    step, backend = rig.step([5, 70], 8), _backend(rig)
    backend.init_cuda_graph_state(2, 16)
    batch = step.forward_batch("eagle")
    final = batch.spec_info.custom_mask
    batch.spec_info.custom_mask = final.clone().fill_(True)
    backend.init_forward_metadata(batch)
    early = worst_row(_extend(step, backend, batch), step.expected())
    batch.spec_info.custom_mask = final
    backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    return {
        "early": early,
        "final": worst_row(_extend(step, backend, batch), step.expected()),
        "room": rig.release.mask_room(backend),
    }


def test_mask_written_after_the_plan_is_the_one_used(patched: Worker) -> None:
    got = patched(late_mask)
    assert got["early"] > WRONG and got["final"] <= BF16 and got["room"] == 0, got


def buffer_sizes(on: bool, max_bs: int, n: int, **case: Any) -> dict[str, Any]:
    """Elements and dtype of every tensor that init_cuda_graph_state leaves on the backend."""
    import torch

    draft, skip = case.pop("draft", False), case.pop("skip_prefill", False)
    rig = _rig("eagle", n, is_draft_worker=draft, **case)
    backend = _backend(rig, on, skip_prefill=skip)
    before = set(vars(backend))
    backend.init_cuda_graph_state(max_bs, max_bs * n)
    made = {name: value for name, value in vars(backend).items() if name not in before or name.startswith("cuda_graph")}
    sizes = {k: [v.numel(), str(v.dtype)] for k, v in made.items() if isinstance(v, torch.Tensor)}
    return {"sizes": sizes, "row": rig.requests.req_to_token.shape[1], "splits": backend.max_kv_splits}


def test_no_buffer_scales_with_width_and_context(patched: Worker) -> None:
    bs, n, heads, latent = 4, 8, 4, 512
    got = patched(buffer_sizes, on=True, max_bs=bs, n=n)
    rows = bs * heads * got["splits"]
    expected = {
        "cuda_graph_kv_indices": [bs * got["row"], "torch.int64"],
        "cuda_graph_attn_logits": [rows * latent, "torch.float32"],
        "cuda_graph_attn_lse": [rows, "torch.float32"],
        "cuda_graph_num_kv_splits": [bs, "torch.int32"],
    }
    assert {name: got["sizes"].pop(name) for name in expected} == expected
    larger = patched(buffer_sizes, on=True, max_bs=bs, n=3 * n, context=500)["sizes"]
    assert got["sizes"] == {name: size for name, size in larger.items() if name not in expected}


@pytest.mark.parametrize(
    "case",
    [{"on": False}, {"on": True, "draft": True}, {"on": True, "skip_prefill": True}, {"on": True, "page_size": 16}],
)
def test_buffers_are_the_releases_where_it_does_not_serve(patched: Worker, stock: Worker, case: dict[str, Any]) -> None:
    mine, released = patched(buffer_sizes, max_bs=4, n=8, **case), stock(buffer_sizes, max_bs=4, n=8, **case)
    assert mine == released and mine["sizes"]["cuda_graph_kv_indices"] == [4 * 8 * 192, "torch.int64"]


@pytest.fixture(scope="session")
def one_split(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A verify kernel on an emulated block, as a library."""
    return str(emulator.build("one_split", tmp_path_factory.mktemp("emulator")))


def stock_layout(kernel: str | None, graph: bool, prefixes: list[int], n: int, bs: int) -> dict[str, Any]:
    """mla_verify on what Triton's own lines leave for a step, with the mask and with it dropped."""
    from mla_rig import causal, worst_row
    from sglang.srt.treeverify.attention import abi
    from triton_buffers import two_source

    rig, rows = _rig("eagle", n), len(prefixes) * n
    step = rig.step(prefixes, n)
    args = two_source(step, _backend(rig, on=False), step.forward_batch("eagle"), bs if graph else None)
    found, chain = args.run(kernel)[:rows], step.expected(causal(len(prefixes), n))
    args.mask_kind = abi.MASK_NONE
    return {
        "tree": worst_row(found, step.expected()),
        "causal": worst_row(found, chain),
        "dropped": worst_row(args.run(kernel)[:rows], chain),
        "forms": args.forms(),
    }


@pytest.mark.pin("v0.5.12.post1")
@pytest.mark.parametrize("graph, width, mask", [(False, "int32", "bool"), (True, "int64", "uint8")])
@pytest.mark.parametrize("prefixes, bs, n", [([9, 0, 44], 4, 8), ([17], 1, 65)])
@pytest.mark.parametrize("emulated", [False, True])
def test_the_stock_layout_is_read_as_it_is(
    patched: Worker, request: pytest.FixtureRequest, emulated: bool, graph: bool, width: str, mask: str,
    prefixes: list[int], bs: int, n: int,
) -> None:  # fmt: skip
    """By the reference and by a kernel's own code: buffers larger than the step, padded rows, stale masks."""
    kernel = request.getfixturevalue("one_split") if emulated else None
    got = patched(stock_layout, kernel=kernel, graph=graph, prefixes=prefixes, n=n, bs=bs)
    assert got["tree"] <= BF16 and got["causal"] > WRONG and got["dropped"] <= BF16, got
    assert got["forms"] == {
        "kv_indptr": "int32", "kv_indices": "int64", "qo_indptr": width, "out_cache_loc": "int64", "mask": mask,
        "mask_indptr": "int64",
    }  # fmt: skip


def operators(on: bool) -> list[str]:
    """What a replay's metadata call runs on the device, in order; views, which launch nothing, left out."""
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from torch.utils._python_dispatch import TorchDispatchMode

    ran: list[str] = []

    class Heard(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                ran.append(func._schema.name)
            return func(*args, **kwargs or {})

    class Kernel:
        """Triton's kernel for the slots, which no dispatcher sees."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: ran.append("create_flashinfer_kv_indices_triton")

    rig, verify = _rig("eagle", 8), ForwardMode.TARGET_VERIFY
    backend, step = _backend(rig, on), rig.step([9, 44], 8)
    backend.init_cuda_graph_state(2, 16)
    rows, lens, mine = step.req_pool_indices, step.seq_lens.int(), step.spec_info("eagle")
    backend.init_forward_metadata_capture_cuda_graph(2, 16, rows, lens, None, verify, mine)
    if on:
        backend.tree_verify.raw_bs = 2
    kernel, triton_backend.create_flashinfer_kv_indices_triton = (
        triton_backend.create_flashinfer_kv_indices_triton, Kernel()
    )  # fmt: skip
    try:
        with Heard():
            backend.init_forward_metadata_replay_cuda_graph(
                2, rows, lens, 53, None, verify, mine, seq_lens_cpu=step.seq_lens_cpu
            )
    finally:
        triton_backend.create_flashinfer_kv_indices_triton = kernel
    return ran


@pytest.mark.pin("v0.5.12.post1")
def test_one_operator_prepares_a_replay_where_stock_takes_ten(patched: Worker) -> None:
    assert patched(operators, on=True) == ["treeverify::mla_prep"]
    assert patched(operators, on=False) == [
        "aten::arange", "aten::copy_", "aten::cumsum", "aten::copy_", "create_flashinfer_kv_indices_triton",
        "aten::copy_", "aten::add", "aten::mul", "aten::cumsum", "aten::copy_",
    ]  # fmt: skip


def graph_bytes(on: bool, max_bs: int, n: int, heads: int, context: int, processors: int) -> dict[str, int]:
    """Bytes of every buffer that init_cuda_graph_state makes on a card of so many multiprocessors; on no device."""
    import dataclasses

    import torch
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.treeverify.attention import abi, paths, plan

    rig = _rig("eagle", n, heads=heads)
    backend = _backend(rig, on)
    backend.device, backend.max_context_len = "meta", context
    backend.max_kv_splits = triton_backend._mla_decode_kv_splits_cap(
        rig.args.triton_attention_num_kv_splits, processors, context
    )
    holders = [backend]
    if on:
        verifier = backend.tree_verify
        verifier._geometry = dataclasses.replace(
            verifier._geometry, device=torch.device("meta"), row_width=context + 4 + n,
            target=paths.Target(abi.PATH_HOPPER, plan.HOPPER_ROW_TILE, processors, many_rows=True),
        )  # fmt: skip
        backend.init_cuda_graph_state(max_bs, max_bs * n)
        holders += verifier._graph.values()
    else:
        backend.init_cuda_graph_state(max_bs, max_bs * n)
    made = {id(t): (name, t) for holder in holders for name, t in vars(holder).items() if isinstance(t, torch.Tensor)}
    return {name: t.nbytes for name, t in made.values() if t.device.type == "meta"}


@pytest.mark.pin("v0.5.12.post1")
def test_graph_buffers_at_k2s_size(patched: Worker) -> None:
    """A rank of eight of Kimi K2, 64 heads, on an H200: 32 requests of 16 draft tokens and up to 256k of context."""
    k2 = {"max_bs": 32, "n": 16, "heads": 8, "context": 262144, "processors": 132}
    stock, mine = patched(graph_bytes, on=False, **k2), patched(graph_bytes, on=True, **k2)
    entries = 32 * 16 * 262144
    assert stock["cuda_graph_kv_indices"] == 8 * entries and stock["cuda_graph_custom_mask"] == entries
    assert sum(stock.values()) > 3.3e9 > 12 * sum(mine.values()), (stock, mine)


def decode_after_verify() -> dict[str, Any]:
    """A decode step on the same backend, which keeps its own metadata and kernels, after a verify step."""
    import torch
    from mla_rig import worst_row
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rig = _rig("eagle", 1, "float16")
    step, backend = rig.step([6, 19], 1, chain=True), _backend(rig)
    batch = step.forward_batch("eagle")
    backend.init_forward_metadata(batch)
    verified = _extend(step, backend, batch)
    batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None
    batch.seq_lens, batch.seq_lens_sum = step.seq_lens + 1, sum(step.prefixes) + 2
    backend.init_forward_metadata(batch)
    q, k = torch.cat([step.q_nope, step.q_rope], -1), torch.cat([step.k, step.k_rope], -1)
    decoded = backend.forward_decode(q, k, step.k, rig.layer, batch)
    return {"metadata": type(backend.forward_metadata).__name__, "error": worst_row(decoded, verified)}


def test_decode_stays_tritons(patched: Worker) -> None:
    got = patched(decode_after_verify)
    assert got["metadata"] == "ForwardMetadata" and got["error"] <= BF16, got


def gate(**case: Any) -> list[Any]:
    """[served or stock, what was logged] for a runner with these properties, TREEVERIFY_TRITON=0 where `on` is not."""
    import logging

    import torch
    from sglang.srt.treeverify import gates

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("sglang.srt.treeverify")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    gates._log_once.cache_clear()
    on, kv, dtype = case.pop("on", True), case.pop("kv", None), case.pop("dtype", "bfloat16")
    runner, skip = case.pop("runner", {}), case.pop("skip_prefill", False)
    variables = case.pop("variables", {})
    try:
        rig = _rig("eagle", 8, dtype, **case)
        rig.runner.__dict__.update(runner)
        if kv:
            rig.runner.kv_cache_dtype = getattr(torch, kv)
        with patch.dict(os.environ, variables):
            backend = _backend(rig, on, skip_prefill=skip)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return ["stock" if getattr(backend, "tree_verify", None) is None else "served", heard]


@pytest.mark.parametrize(
    "case, outcome, said",
    [
        ({}, "served", "INFO treeverify: TARGET_VERIFY of triton (MLA) runs on treeverify's"),
        pytest.param({"speculative_algorithm": "DDTREE"}, "served", "runs on treeverify's", marks=NEEDS_DDTREE),
        ({"speculative_algorithm": "NGRAM"}, "served", "runs on treeverify's"),
        ({"speculative_algorithm": "DFLASH", "speculative_eagle_topk": 1}, "served", "runs on treeverify's"),
        ({"dtype": "float16"}, "served", "runs on treeverify's"),
        ({"variables": {"TREEVERIFY_TRITON": "1"}}, "served", "runs on treeverify's"),
        ({"variables": {"TREEVERIFY_TRITON": ""}}, "served", "runs on treeverify's"),
        ({"on": False}, "stock", None),
        ({"variables": {"TREEVERIFY_TRITON": "false"}}, "stock", None),
        ({"is_draft_worker": True}, "stock", None),
        ({"skip_prefill": True}, "stock", None),
        ({"speculative_algorithm": None}, "stock", None),
        ({"prefill_attention_backend": "fa3"}, "stock", None),
        ({"runner": {"use_mla_backend": False}}, "stock", "not MLA"),
        ({"runner": {"sliding_window_size": 128}}, "stock", "sliding windows"),
        ({"page_size": 16}, "stock", "page size 16"),  # an EAGLE tree, which SGLang itself cannot commit there
        pytest.param(
            {"speculative_algorithm": "DDTREE", "page_size": 64}, "served", "runs on treeverify's", marks=NEEDS_DDTREE
        ),
        ({"speculative_algorithm": "DFLASH", "speculative_eagle_topk": 1, "page_size": 32}, "served", "runs on"),
        ({"dtype": "float32"}, "stock", "float32"),
        ({"kv": "float8_e4m3fn"}, "served", "runs on treeverify's"),
        ({"kv": "float8_e4m3fn", "dtype": "float16"}, "stock", "float8_e4m3fn"),
        ({"enable_deterministic_inference": True}, "stock", "--enable-deterministic-inference"),
        ({"enable_two_batch_overlap": True}, "stock", "--enable-two-batch-overlap"),
        ({"heads": 129}, "stock", "129 query heads"),
        ({"variables": {"TREEVERIFY_DISABLE": "1"}}, "stock", "INFO treeverify: TREEVERIFY_DISABLE is set"),
    ],
)
def test_gate_never_refuses_a_tree(patched: Worker, case: dict[str, Any], outcome: str, said: str | None) -> None:
    found, heard = patched(gate, **case)
    assert found == outcome
    if said is None:
        assert not heard
    else:
        assert len(heard) == 1 and said in heard[0] and "DROP" not in heard[0], heard


def foreign_device() -> str:
    """Why it does not serve on another vendor's device, where SGLang's Triton backend runs too."""
    import torch
    from sglang.srt.treeverify import gates

    return gates.obstacle(_rig("eagle", 8).runner, "triton", torch.device("xpu"), True).why


def test_other_vendors_devices_keep_their_own(patched: Worker) -> None:
    assert patched(foreign_device) == "the kernels are CUDA, the device is xpu"


def comes_to_compare(**case: Any) -> int:
    """How often a rank comes to the others to compare what is installed."""
    from sglang.srt.treeverify import ranks

    ranks.check_installation.cache_clear()
    gate(**case)
    return int(ranks.check_installation.cache_info().misses)


def test_a_rank_without_kernels_does_not_keep_the_others_waiting(patched: Worker) -> None:
    """The comparison is a collective: who stays on SGLang's kernels for a reason of their own must have been there."""
    assert patched(comes_to_compare, variables={"TREEVERIFY_PATH": "of no kernel"}) == 1
    assert patched(comes_to_compare) == 1
    assert patched(comes_to_compare, runner={"use_mla_backend": False}) == 0


def subclass() -> bool:
    """A draft step's backend derives from TritonAttnBackend."""
    from sglang.srt.treeverify.attention.triton_draft import MLADraftStep

    return getattr(MLADraftStep(_rig("eagle", 8).runner), "tree_verify", None) is None


@pytest.mark.pin("v0.5.12.post1", "v0.5.17")
def test_subclasses_keep_their_own(patched: Worker) -> None:
    assert patched(subclass)
