# SPDX-License-Identifier: Apache-2.0
"""Moves rows of SGLang's KV pools: all layers of all pools that share their slots, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import ops  # noqa: F401 - defines the op
from .limits import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.memory_pool import KVCache

_kv_move = torch.ops.treeverify.kv_move.default


class Unmovable(ValueError):
    """A pool whose rows cannot be moved here."""


@dataclass(frozen=True)
class Buffers:
    """Where rows lie, as kv_move takes it. The tensors are kept: theirs are the addresses."""

    tensors: tuple[torch.Tensor, ...]
    bases: torch.Tensor
    """int64 [buffers]: addresses."""
    row_bytes: torch.Tensor
    """int64 [buffers]."""
    longest: int
    """Bytes."""
    slots: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Buffers:
        """Of contiguous [slots, ...] tensors on one device; what the longest has more of slots is not reached.

        Raises:
            Unmovable: rows that are not made of 16-byte pieces, or not contiguous.
        """
        for t in tensors:
            size = t[0].nbytes
            if size % PIECE_BYTES or t.data_ptr() % PIECE_BYTES or not t.is_contiguous():
                raise Unmovable(
                    f"treeverify: KV rows of {size} bytes at {t.data_ptr():#x}, strides {t.stride()}: they are moved "
                    f"in pieces of {PIECE_BYTES} bytes, from contiguous buffers"
                )
        sizes = [t[0].nbytes for t in tensors]
        bases, row_bytes = torch.tensor([[t.data_ptr() for t in tensors], sizes], device=tensors[0].device)
        return cls(tuple(tensors), bases, row_bytes, max(sizes), min(len(t) for t in tensors))


def tensors_of(pool: KVCache) -> list[torch.Tensor]:
    """All that a slot of a pool consists of: its rows' tensors, layer by layer.

    Raises:
        Unmovable: a kind of pool that has more to it (an index, scales, two sizes).
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    if type(pool) is MHATokenToKVPool:
        return [*pool.k_buffer, *pool.v_buffer]
    raise Unmovable(
        f"treeverify: rows of {type(pool).__name__} cannot be moved, only those of MLATokenToKVPool and "
        "MHATokenToKVPool"
    )


class Mover:
    """Moves rows of some pools whose slots are the same."""

    def __init__(self, *pools: KVCache) -> None:
        """Raises Unmovable for what it cannot move."""
        self._pools = pools
        self.buffers = Buffers.of([tensor for pool in pools for tensor in tensors_of(pool)])

    def __call__(
        self, src: torch.Tensor, dst: torch.Tensor, entries: torch.Tensor | None = None, group: int = 0
    ) -> None:
        """Launches the move, after whatever a hierarchical cache still loads into these pools.

        Args:
            src: int32 or int64 [capacity], slots; dst: the same.
            entries: int32 [1], None for all; group: see ops.MoveArgs.
        """
        for pool in self._pools:
            _await_layers(pool)
        to = self.buffers
        _kv_move(to.bases, to.row_bytes, to.longest, to.slots, src, dst, entries, group)


def _await_layers(pool: KVCache) -> None:
    """Makes the stream wait for the layers that HiCache is loading, as the pool does where it hands out a layer."""
    counter = pool.layer_transfer_counter
    if counter is not None:
        for layer in range(pool.layer_num):
            counter.wait_until(layer)
