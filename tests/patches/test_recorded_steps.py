# SPDX-License-Identifier: Apache-2.0
"""mla_prep's own code, built by g++, on what patched backends gave it: slots, lengths and masks of the step."""

from __future__ import annotations

import ctypes
from typing import Any

import emulator
import pytest
import recorded
import torch
from treeverify.attention import abi, ops
from worker import Worker

UNWRITTEN = -7


@pytest.fixture(scope="session")
def host_prep(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The launch on an emulated machine."""
    library = ctypes.CDLL(str(emulator.build("prep", tmp_path_factory.mktemp("prep"), cuda=False)))
    library.tv_emulate_prep.restype = ctypes.c_char_p
    return library.tv_emulate_prep


@pytest.fixture(scope="session")
def steps(patched: Worker, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Recorded steps of the pin."""
    file = tmp_path_factory.mktemp("recorded") / "steps.pt"
    assert patched(recorded.record, file=str(file)) == [case.name for case in recorded.CASES]
    found: list[dict[str, Any]] = torch.load(file, weights_only=True)
    return found


def _prepared(host_prep: Any, step: dict[str, Any], **changes: Any) -> ops.PrepArgs:
    """The recorded arguments, their buffers written anew."""
    given = ops.PrepArgs(*step["prep"])._replace(**changes)
    fresh = {name: torch.full_like(getattr(given, name), UNWRITTEN) for name in given._fields[-3:]}
    args = given._replace(**fresh)
    for blocks in (1, 3):
        error = host_prep(ctypes.byref(ops.prep_params(args)), blocks, ctypes.c_uint64(blocks))
        assert error is None, error.decode()
    return args


@pytest.mark.parametrize("at", range(len(recorded.CASES)), ids=[case.name for case in recorded.CASES])
def test_prep_s_code_on_what_sglang_gave_it(host_prep: Any, steps: list[dict[str, Any]], at: int) -> None:
    step = steps[at]
    args, indptr, indices = _prepared(host_prep, step), step["kv_indptr"], step["kv_indices"]
    assert args.kv_indptr[: len(indptr)].tolist() == indptr
    assert args.kv_indices.flatten()[: len(indices)].tolist() == indices
    assert set(args.kv_indices.flatten()[len(indices) :].tolist()) <= {UNWRITTEN}, "it wrote past the batch's slots"
    mask = recorded.packed(step["visible"])
    found = args.packed_mask.flatten()[: mask.numel()]
    assert torch.equal(found, mask.flatten())
    dropped = _prepared(host_prep, step, custom_mask=None, mask_kind=abi.MASK_NONE)
    assert not torch.equal(dropped.packed_mask.flatten()[: mask.numel()], mask.flatten()), "the tree is a chain"
    verify = ops.VerifyArgs(*step["verify"])
    assert torch.equal(verify.kv_indptr[: len(indptr)], args.kv_indptr[: len(indptr)])
    assert verify.mask is not None and torch.equal(verify.mask.flatten()[: mask.numel()], found)
