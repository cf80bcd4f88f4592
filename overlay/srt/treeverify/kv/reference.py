# SPDX-License-Identifier: Apache-2.0
"""What kv_move does, by NumPy, in memory of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Moves:
    """Entries that move something."""

    src: Any
    """int64 [n]."""
    dst: Any
    """int64 [n]."""
    group: Any
    """int64 [n]: number of the group."""
    slots: int

    @classmethod
    def of(cls, src: torch.Tensor, dst: torch.Tensor, slots: int, group: int) -> Moves:
        """Of the entries given; group as in kv_move."""
        a, b = src.numpy().astype(np.int64), dst.numpy().astype(np.int64)
        real = (a != b) & (a >= 0) & (a < slots) & (b >= 0) & (b < slots)
        return cls(a[real], b[real], (np.arange(len(a)) // max(group, 1))[real], slots)

    def problems(self) -> Iterator[str]:
        """Slots whose content would depend on the order of the moves."""
        entered, times = np.unique(self.dst, return_counts=True)
        for slot in entered[times > 1][:1]:
            yield f"two moves enter slot {slot}, expected one at most"
        at = np.searchsorted(entered, self.src).clip(max=max(len(entered) - 1, 0))
        by = np.empty(len(entered), dtype=np.int64)
        by[np.searchsorted(entered, self.dst)] = self.group
        wrong = (entered[at] == self.src) & (by[at] != self.group) if len(entered) else np.zeros(0, dtype=bool)
        for slot in self.src[wrong][:1]:
            yield f"slot {slot} is left in one group and entered in another: split the moves, or put both in one group"

    def apply(self, base: int, row_bytes: int) -> None:
        """Moves rows of the buffer at this address; those that one leaves and another enters, too."""
        memory = (ctypes.c_uint8 * (self.slots * row_bytes)).from_address(base)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(self.slots, row_bytes)
        rows[self.dst] = rows[self.src]
