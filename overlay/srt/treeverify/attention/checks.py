# SPDX-License-Identifier: Apache-2.0
"""What the ops say of arguments that their kernels could not take: what, where, and what they expect."""

from __future__ import annotations

from collections.abc import Iterator

import torch

INDEX_BYTES = {torch.int32: 4, torch.int64: 8}


def check(problems: Iterator[str]) -> None:
    """Raises ValueError with the first problem. Generators: a message is only made where something is wrong."""
    for problem in problems:
        raise ValueError(f"treeverify: {problem}")


def not_dense(**tensors: torch.Tensor | None) -> Iterator[str]:
    """The kernels walk these by bare pointers: contiguous, and all on one device."""
    device = None
    for name, t in tensors.items():
        if t is None:
            continue
        device = device or t.device
        if not t.is_contiguous():
            yield f"{name} has strides {t.stride()}, expected contiguous"
        if t.device != device:
            yield f"{name} is on {t.device}, expected {device}"


def not_index(**tensors: torch.Tensor) -> Iterator[str]:
    for name, t in tensors.items():
        if t.dtype not in INDEX_BYTES:
            yield f"{name} is {t.dtype}, expected int32 or int64"


def too_short(entries: int, **tensors: torch.Tensor | None) -> Iterator[str]:
    for name, t in tensors.items():
        if t is not None and t.numel() < entries:
            yield f"{name} has {t.numel()} entries, expected at least {entries}"


def not_typed(dtype: torch.dtype, **tensors: torch.Tensor | None) -> Iterator[str]:
    for name, t in tensors.items():
        if t is not None and t.dtype != dtype:
            yield f"{name} is {t.dtype}, expected {dtype}"
