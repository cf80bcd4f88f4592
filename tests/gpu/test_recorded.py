# SPDX-License-Identifier: Apache-2.0
"""The kernels on the very tensors that a patched SGLang gave the ops on the CPU; scripts/record_steps.py keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from applier.layout import CHECKOUT
from treeverify.attention import abi, ops

pytestmark = pytest.mark.gpu

BF16 = 5e-3
WRONG = 0.05
"""A mask that is not honoured moves some row of these inputs by far more than this."""
FILES = sorted((CHECKOUT.build / "recorded").glob("*.pt"))
NONE = pytest.mark.skip(reason="nothing in build/recorded: scripts/record_steps.py fills it, where SGLang imports")


def _moved(args: list[Any]) -> list[Any]:
    """To the GPU, with the strides they have."""
    return [_on_gpu(a) if isinstance(a, torch.Tensor) else a for a in args]


def _on_gpu(t: torch.Tensor) -> torch.Tensor:
    storage = torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()).cuda().untyped_storage()
    return torch.empty(0, dtype=t.dtype, device="cuda").set_(storage, t.storage_offset(), t.shape, t.stride())


def _worst(out: torch.Tensor, expected: torch.Tensor) -> float:
    out = out.double().cpu()
    return float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("case", recorded.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "file", FILES or [pytest.param(None, marks=NONE)], ids=lambda file: file.stem if file else "none"
)
def test_what_sglang_gave(file: Path, case: recorded.Case) -> None:
    (step,) = (step for step in torch.load(file, weights_only=True) if step["name"] == case.name)
    indptr, indices, mask = step["kv_indptr"], step["kv_indices"], recorded.packed(step["visible"])
    prep = ops.PrepArgs(*_moved(step["prep"]))
    prep = prep._replace(**{name: torch.full_like(getattr(prep, name), -7) for name in prep._fields[-3:]})
    ops.mla_prep(*prep)
    assert prep.kv_indptr[: len(indptr)].tolist() == indptr
    assert prep.kv_indices.flatten()[: len(indices)].tolist() == indices
    assert torch.equal(prep.packed_mask.flatten()[: mask.numel()].cpu(), mask.flatten())
    verify = ops.VerifyArgs(*_moved(step["verify"]))
    verify = verify._replace(
        kv_indptr=prep.kv_indptr, kv_indices=prep.kv_indices, mask=prep.packed_mask,
        workspace=torch.empty(step["workspace"], device="cuda"),
    )  # fmt: skip
    real = step["real"] * step["n"]
    for args, honoured in ((verify, True), (verify._replace(mask=None, mask_kind=abi.MASK_NONE), False)):
        args.out.fill_(float("nan"))
        ops.mla_verify(*args)
        error = _worst(args.out[:real], step["attention"])
        assert error <= BF16 if honoured else error > WRONG, (error, honoured)
        assert not args.out[real:].any(), "rows of padding are zeros"
