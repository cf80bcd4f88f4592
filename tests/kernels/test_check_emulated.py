# SPDX-License-Identifier: Apache-2.0
"""What a debug build asks of the index arrays (kernels/check.cuh), on an emulated block."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from treeverify.attention import abi, cases, ops

Said = Callable[[ctypes.Structure], "str | None"]


@pytest.fixture(scope="session")
def said(emulator_build: Callable[..., ctypes.CDLL]) -> Said:
    """What a debug build prints of these parameters, None where it lets them pass."""
    lib = emulator_build("check", cuda=False)
    entries = {abi.VerifyParams: lib.tv_emulate_check_verify, abi.PrepParams: lib.tv_emulate_check_prep}
    for entry in entries.values():
        entry.restype, entry.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def ask(params: ctypes.Structure) -> str | None:
        answer = entries[type(params)](ctypes.byref(params))
        return answer.decode() if answer else None

    return ask


def params_of(case: cases.Case) -> abi.VerifyParams:
    args = (case.q_nope, case.q_pe, case.pool, case.kv_indptr, case.kv_indices, case.qo_indptr, case.out_cache_loc)
    mask = (case.mask, case.mask_indptr, case.mask_kind)
    tail = (case.bs, case.n, case.nsplit, case.sm_scale, case.logit_cap, case.out, case.workspace)
    return ops.verify_params(ops.VerifyArgs(*args, *mask, *tail))


def step(**how: Any) -> cases.Case:
    return cases.make_case([300, 0, 5], 4, 2, device="cpu", nsplit=1, **how)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("how", [{"padded": 2, "extra_tokens": 3}, {"two_source": True}])
def test_a_right_step_passes(said: Said, how: dict[str, Any], index: torch.dtype) -> None:
    assert said(params_of(step(index_dtype=index, qo_dtype=index, **how))) is None


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("beyond", [0, -1])
def test_a_slot_outside_the_pool_is_named(said: Said, index: torch.dtype, beyond: int) -> None:
    case = step(index_dtype=index)
    wrong, slots = beyond if beyond < 0 else case.pool.shape[0], case.pool.shape[0]
    case.kv_indices[304 + 4 + 7] = wrong
    expected = f"request 2: slot of KV position 7 is {wrong}, expected 0 <= it < {slots}"
    assert expected in str(said(params_of(case)))


def test_a_draft_slot_outside_the_pool_is_named(said: Said) -> None:
    case = step(two_source=True)
    assert case.out_cache_loc is not None
    case.out_cache_loc[4 + 3] = case.pool.shape[0]
    assert "request 1: slot of draft row 3 is" in str(said(params_of(case)))


def test_arrays_of_ranges_that_run_backwards_are_named(said: Said) -> None:
    case = step()
    case.kv_indptr[1] = -3
    assert "request 0: KV length, from entry 0 is -3" in str(said(params_of(case)))
    case = step()
    case.qo_indptr[2] = 9
    assert "request 1: draft width, from row 4 is 5, expected 0 <= it < 5" in str(said(params_of(case)))


def prep(rows: list[int], lens: list[int], raw: int) -> abi.PrepParams:
    bs, n = len(rows), 4
    args = ops.PrepArgs(
        torch.zeros(3, 20, dtype=torch.int32), torch.tensor(rows), torch.tensor(lens), None, abi.MASK_NONE, raw, bs, n,
        torch.zeros(bs + 1, dtype=torch.int32), torch.zeros(bs * 20, dtype=torch.int32),
        torch.zeros(bs * n, dtype=torch.int64),
    )  # fmt: skip
    params = ops.prep_params(args)
    params.kept = args  # its tensors must outlive the call
    return params


def test_rows_of_requests_are_checked_and_stale_ones_are_not(said: Said) -> None:
    assert said(prep([2, 0, 99], [20, 0, -7], raw=2)) is None  # the third is padding
    assert "request 1: row of req_to_token, entry 1 is 3, expected 0 <= it < 3" in str(said(prep([2, 3], [5, 5], 2)))
    assert "request 0: length, entry 0 is 21, expected 0 <= it < 21" in str(said(prep([0], [21], 1)))
