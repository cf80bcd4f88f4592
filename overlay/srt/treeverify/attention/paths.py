# SPDX-License-Identifier: Apache-2.0
"""Which verify kernel a device gets, and what the number of splits is chosen from."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import NamedTuple

import torch

from . import abi
from .plan import PORTABLE_ROW_TILE, Cut, choose_cut, planned_splits

CHOICE = "TREEVERIFY_PATH"
"""auto (the default), portable, hopper, or narrow: the portable path as cards with 99 KB of shared memory run it."""

NAMES = {
    "auto": abi.PATH_AUTO,
    "portable": abi.PATH_PORTABLE,
    "hopper": abi.PATH_HOPPER,
    "narrow": abi.PATH_NARROW,
}


FP8 = {torch.float8_e4m3fn: abi.FP8_E4M3, torch.float8_e5m2: abi.FP8_E5M2}
"""KV pools of one byte an element, as the kernels name them."""


def reads(dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether there are kernels for queries of `dtype` (bfloat16 or float16) on a KV pool of `kv_dtype`."""
    return kv_dtype == dtype or (dtype == torch.bfloat16 and kv_dtype in FP8)


class Target(NamedTuple):
    """A device as the launch geometry sees it."""

    path: int
    """abi.PATH_*, but AUTO."""
    max_row_tile: int
    """Most query rows a block of that path holds."""
    sm_count: int
    """Multiprocessors, 0 where unknown."""
    many_rows: bool = False
    """Whether that path has a kernel for requests of many query rows (plan.has_many_rows): fewer rows a block."""
    few: Target | None = None
    """What requests of no more than abi.FEW_ROWS query rows take, where that is another path."""

    @property
    def name(self) -> str:
        """The path, as TREEVERIFY_PATH names it."""
        return next(name for name, path in NAMES.items() if path == self.path)

    def of(self, n: int, heads: int) -> Target:
        """What requests of `n` tokens and `heads` query heads take."""
        return self.few if self.few is not None and n * heads <= abi.FEW_ROWS else self

    def cut(self, bs: int, n: int, heads: int) -> Cut:
        """How the KV of each of `bs` requests of `n` tokens and `heads` query heads is split."""
        taken = self.of(n, heads)
        return choose_cut(bs, n, heads, taken.sm_count, taken.max_row_tile, taken.many_rows)

    def planned_splits(self, bs: int, n: int, heads: int) -> int:
        """Splits of all of them together, for mla_plan to hand out; 0 where a plan has nothing to choose."""
        taken = self.of(n, heads)
        return planned_splits(bs, n, heads, taken.sm_count, taken.max_row_tile, taken.many_rows)


def chosen() -> int:
    """What TREEVERIFY_PATH asks for, as abi.PATH_*.

    Raises:
        ValueError: it names no path.
    """
    name = os.environ.get(CHOICE) or "auto"
    if name not in NAMES:
        raise ValueError(f"treeverify: {CHOICE}={name}: expected one of {', '.join(NAMES)}")
    return NAMES[name]


@functools.cache
def target(device: torch.device, path: int = abi.PATH_AUTO, kv_dtype: torch.dtype = torch.bfloat16) -> Target:
    """What `device` runs where `path` is asked for. The CPU's reference stands in for the portable path.

    Args:
        kv_dtype: of the KV pool. That of the queries makes no difference.

    Raises:
        RuntimeError: the library is missing, or holds no machine code of that path for this device.
    """
    if device.type != "cuda":
        return Target(abi.PATH_PORTABLE, PORTABLE_ROW_TILE, 0)
    few, many = (_target(device, path, kv_dtype, rows) for rows in (abi.FEW_ROWS, abi.FEW_ROWS + 1))
    return many if few == many else many._replace(few=few)


def _target(device: torch.device, path: int, kv_dtype: torch.dtype, rows: int) -> Target:
    taken, tile, many = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    answers = ctypes.byref(taken), ctypes.byref(tile), ctypes.byref(many)
    with torch.cuda.device(device):
        kv = FP8.get(kv_dtype, abi.BF16)
        code = abi.library().tv_mla_path(path, abi.BF16, kv, rows, *answers)
        abi.check(code, "mla_path")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(taken.value, tile.value, sms, bool(many.value))


def available(device: torch.device, kv_dtype: torch.dtype = torch.bfloat16) -> list[Target]:
    """Every path that a server on `device` can take on such a KV pool, AUTO's choice first."""
    asked = abi.PATH_AUTO, abi.PATH_PORTABLE
    return list(dict.fromkeys(target(device, path, kv_dtype) for path in asked))


def testable(device: torch.device, kv_dtype: torch.dtype = torch.bfloat16) -> list[Target]:
    """Those, and on a Hopper card the narrow one: other cards' portable path is narrow already."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return available(device, kv_dtype)
    return [*available(device, kv_dtype), target(device, abi.PATH_NARROW, kv_dtype)]
