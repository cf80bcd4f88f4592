# SPDX-License-Identifier: Apache-2.0
"""attention/packed.py against the ops: the kernels are given the same parameters, or both refuse with the same words.

On the CPU, whatever the kernels would be given; tests/gpu launches them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from treeverify.attention import abi, buffers, cases, launch, ops, packed, paths
from treeverify.attention.plan import PORTABLE_ROW_TILE, mask_words

BS, N, CONTEXT = 3, 66, 40
TABLE = torch.zeros(5, CONTEXT, dtype=torch.int32)


@pytest.fixture(scope="module")
def given_to() -> Iterator[list[tuple[str, bytes]]]:
    """What was launched: the kernel's name and its parameters. Nothing runs."""
    found: list[tuple[str, bytes]] = []

    def heard(what: str, params: ctypes.Structure, device: torch.device) -> None:
        assert device.type == "cpu"
        found.append((what, bytes(params)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "launch", heard)
        patch.setattr(packed, "launch", heard)
        yield found


def metadata(bs: int = BS, plan: bool = False) -> buffers.VerifyMetadata:
    target = paths.Target(abi.PATH_PORTABLE, PORTABLE_ROW_TILE, 132)
    geometry = buffers.Geometry(torch.device("cpu"), heads=2, row_width=CONTEXT, target=target, plan=plan)
    return buffers.GraphBuffers(geometry, max(bs, 1), N).metadata(bs)


BUCKET = metadata()
PREP = packed.PackedPrep(TABLE, BUCKET)


def attempt(launched: list[tuple[str, bytes]], call: Any) -> list[tuple[str, bytes]] | str:
    """What a call launched, or what it said."""
    launched.clear()
    try:
        call()
    except ValueError as e:
        return str(e)
    return list(launched)


def drawn(data: st.DataObject, dtypes: list[torch.dtype], sizes: list[int]) -> torch.Tensor:
    wide = torch.zeros(2 * max(sizes), dtype=data.draw(st.sampled_from(dtypes)))
    return wide[: data.draw(st.sampled_from(sizes))] if data.draw(st.integers(0, 5)) else wide[::2][: max(sizes)]


@settings(max_examples=300)
@given(data=st.data())
def test_prep_gives_and_refuses_what_the_op_does(given_to: list[tuple[str, bytes]], data: st.DataObject) -> None:
    rows = drawn(data, [torch.int64, torch.int64, torch.int64, torch.int32], [0, 2, BS, BS + 1])
    lens = drawn(data, [torch.int64, torch.int32, torch.int32, torch.float32], [0, 2, BS, BS + 1])
    words = BS * N * mask_words(N)
    mask = data.draw(st.booleans()) and drawn(data, [torch.int64, torch.uint8, torch.bool], [0, words - 1, words])
    step = (rows, lens, None if mask is False else mask, data.draw(st.integers(-1, 4)), data.draw(st.integers(-1, 4)))
    out = BUCKET.kv_indptr, BUCKET.kv_indices, BUCKET.mask
    expected = attempt(given_to, lambda: ops._prep_cuda(TABLE, *step, BS, N, *out))
    assert attempt(given_to, lambda: PREP(*step)) == expected


def test_both_sides_of_that_comparison_occur(given_to: list[tuple[str, bytes]]) -> None:
    """A step of each mask form, and one fault of each argument."""
    rows, lens, words = torch.zeros(BS, dtype=torch.int64), torch.zeros(BS), BS * N * mask_words(N)
    masks = [None, torch.zeros(words, dtype=torch.int64), torch.zeros(9, dtype=torch.bool), torch.zeros(9).byte()]
    for step in [(rows, lens.int(), mask, kind, BS) for kind, mask in enumerate(masks)]:
        assert [what for what, _ in attempt(given_to, lambda step=step: PREP(*step))] == ["mla_prep"]
    packed_mask = masks[1]
    for step, said in [
        ((rows, lens, packed_mask, 1, BS), "seq_lens is torch.float32"),
        ((rows.int(), lens.int(), packed_mask, 1, BS), "req_pool_indices is torch.int32"),
        ((rows[:2], lens.int(), packed_mask, 1, BS), "req_pool_indices has 2 entries"),
        ((rows, lens.int(), packed_mask[1:], 1, BS), "custom_mask has"),
        ((rows, lens.int(), packed_mask, 3, BS), "custom_mask is torch.int64"),
        ((rows, lens.int(), packed_mask, 5, BS), "mask_kind 5"),
        ((rows, lens.int(), None, 2, BS), "needs a custom_mask"),
        ((rows, lens.int(), None, 0, BS + 1), "raw_bs 4 is not within"),
        ((rows.to("meta"), lens.int(), None, 0, BS), "req_pool_indices is on meta"),
    ]:
        assert said in attempt(given_to, lambda step=step: PREP(*step)) and not given_to


def test_a_planned_bucket_is_planned_after_its_prep(given_to: list[tuple[str, bytes]]) -> None:
    to = metadata(plan=True)
    assert to.split_indptr is not None and to.splits > BS
    rows, lens = torch.zeros(BS, dtype=torch.int64), torch.zeros(BS, dtype=torch.int64)
    found = attempt(given_to, lambda: packed.PackedPrep(TABLE, to)(rows, lens, None, abi.MASK_NONE, BS))
    expected = attempt(given_to, lambda: ops._plan_cuda(to.kv_indptr, BS, to.splits, to.split_indptr))
    assert [what for what, _ in found] == ["mla_prep", "mla_plan"] and found[1:] == expected


def test_an_empty_batch_launches_nothing(given_to: list[tuple[str, bytes]]) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert attempt(given_to, lambda: packed.PackedPrep(TABLE, metadata(0))(none, none, None, 0, 0)) == []


def test_a_bucket_of_foreign_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="req_to_token is torch.int64"):
        packed.PackedPrep(TABLE.long(), BUCKET)


def verify_args() -> ops.VerifyArgs:
    case = cases.make_case([4, 9], 3, 2, device="cpu", nsplit=2)
    return ops.VerifyArgs(
        case.q_nope.contiguous(), case.q_pe, case.pool, case.kv_indptr, case.kv_indices, case.qo_indptr, None,
        case.mask, None, abi.MASK_PACKED, case.bs, case.n, case.nsplit, 0.5, 0.0, case.out, case.workspace,
    )  # fmt: skip


def test_layers_get_what_the_op_gives_them(
    given_to: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that differ in pool, scale, cap, strides or alignment; each step's tensors lie elsewhere."""
    asked: list[ops.VerifyArgs] = []
    params = ops.verify_params
    monkeypatch.setattr(ops, "verify_params", lambda a: (asked.append(a), params(a))[1])
    call, args = packed.PackedVerify(), verify_args()
    spread = torch.zeros(6, 3, 2 * 512, dtype=torch.bfloat16)[:, :2, ::2][..., :512]
    odd = torch.zeros(6 * 2 * 512 + 8, dtype=torch.bfloat16)
    layers = [
        {},
        {"kv_buffer": args.kv_buffer.clone()},
        {"sm_scale": 0.25},
        {"logit_cap": 30.0},
        {"q_nope": torch.zeros(6, 3, 512, dtype=torch.bfloat16)[:, 1:]},
        {"q_nope": odd[2:-6].view(6, 2, 512)},
        {"out": torch.zeros(6, 3, 512, dtype=torch.bfloat16)[:, 1:]},
    ]
    for step in range(3):
        for layer in layers:
            moved = args._replace(**{"q_pe": args.q_pe.clone(), "q_nope": args.q_nope.clone(), **layer})
            expected = attempt(given_to, lambda moved=moved: ops._verify_cuda(*moved))
            asked.clear()
            assert attempt(given_to, lambda moved=moved: call(*moved)) == expected and len(expected) == 1
            assert len(asked) == (step == 0), "packed once"
    wrong: list[dict[str, Any]] = [
        {"q_nope": args.q_nope.half()},
        {"q_nope": spread},
        {"q_nope": odd[1:-7].view(6, 2, 512)},
        {"q_pe": args.q_pe[:5]},
        {"kv_buffer": args.kv_buffer.float()},
        {"kv_buffer": args.kv_buffer[..., :575]},
        {"out": args.out.float()},
        {"out": args.out[:, :1]},
        {"out": odd[2:-6].view(6, 2, 512)},
    ]
    for fault in wrong:
        moved = args._replace(**fault)
        expected = attempt(given_to, lambda moved=moved: ops._verify_cuda(*moved))
        assert isinstance(expected, str) and attempt(given_to, lambda moved=moved: call(*moved)) == expected


def test_eager_metadata_is_kept_while_it_fits() -> None:
    target = paths.Target(abi.PATH_PORTABLE, PORTABLE_ROW_TILE, 132)
    eager = buffers.EagerBuffers(buffers.Geometry(torch.device("cpu"), heads=2, row_width=CONTEXT, target=target))
    first = eager.metadata(2, 4, 100)
    assert first.packed is not None and eager.metadata(2, 4, 150) is first
    for bs, n, kv in [(2, 4, 151), (3, 4, 20), (3, 5, 20), (2, 5, 20)]:
        found = eager.metadata(bs, n, kv)
        assert found is not first and found.packed is not first.packed
        assert (found.bs, found.n) == (bs, n) and found.kv_indices.numel() >= kv
    with pytest.raises(RuntimeError, match="lower --max-running-requests"):
        eager.metadata(2, 5, buffers.KV_LIMIT)


@pytest.mark.parametrize("current", [3, 1])
def test_launch_names_what_failed(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """On the device of its tensors, whichever is current, on the stream that is current there."""
    seen: list[tuple[int, int]] = []
    device = [current]
    codes = itertools.chain([0], itertools.repeat(700))

    def entry(params: object, stream: int) -> int:
        seen.append((device[0], stream))
        return next(codes)

    class On:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            device[0], self.index = self.index, device[0]

        def __exit__(self, *error: object) -> None:
            device[0] = self.index

    monkeypatch.setattr(abi, "entry", lambda what: entry)
    monkeypatch.setattr(abi, "library", lambda: SimpleNamespace(tv_error_string=lambda code: b"an illegal address"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(launch, "_stream", lambda index: 100 + index)
    where = SimpleNamespace(index=3)
    launch.launch("mla_prep", abi.PrepParams(), where)
    with pytest.raises(RuntimeError, match=r"mla_prep failed: an illegal address \(cudaError 700\)"):
        launch.launch("mla_prep", abi.PrepParams(), where)
    assert seen == [(3, 103)] * 2 and device == [current]
