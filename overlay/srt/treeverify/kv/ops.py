# SPDX-License-Identifier: Apache-2.0
"""torch.ops.treeverify.kv_move: rows of all layers from slots to slots, in one launch.

On CUDA it only launches: no copy, no allocation, no synchronisation, and the grid depends on shapes alone, so that a
CUDA graph can hold it. On the CPU the reference answers, which also refuses what the kernel could not see: moves whose
order would matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..attention.checks import INDEX_BYTES, check, not_dense, not_index, not_typed
from ..attention.launch import launch
from . import abi, reference
from .limits import MAX_GROUP, PIECE_BYTES


class MoveArgs(NamedTuple):
    """Arguments of kv_move, in order.

    An entry copies row src[i] to row dst[i] in every buffer; one that leads to where it is, or that names a slot
    outside of 0 .. slots - 1, does nothing. Entries are taken in groups, of which all rows are read before any is
    written. No slot that one group enters may another leave or enter.
    """

    bases: torch.Tensor  # int64 [buffers]: addresses of row 0, multiples of 16. What is there is written
    row_bytes: torch.Tensor  # int64 [buffers], multiples of 16
    longest: int  # the greatest of them, bytes
    slots: int  # rows of every buffer
    src: torch.Tensor  # int32 or int64 [capacity]
    dst: torch.Tensor  # [capacity], as src
    entries: torch.Tensor | None  # int32 [1]: how many are there, the first ones; None: all
    group: int  # entries of a group, 1 .. 256; 0: each is one of its own


_lib = torch.library.Library("treeverify", "FRAGMENT")
_lib.define(
    "kv_move(Tensor(a!) bases, Tensor row_bytes, int longest, int slots, Tensor src, Tensor dst, Tensor? entries, "
    "int group) -> ()"
)


def _problems(a: MoveArgs) -> Iterator[str]:
    yield from not_typed(torch.int64, bases=a.bases, row_bytes=a.row_bytes)
    yield from not_typed(torch.int32, entries=a.entries)
    yield from not_index(src=a.src, dst=a.dst)
    if a.src.dtype != a.dst.dtype:
        yield f"src is {a.src.dtype} and dst {a.dst.dtype}, expected the same"
    if a.bases.dim() != 1 or a.bases.shape != a.row_bytes.shape or not len(a.bases):
        yield f"bases is {tuple(a.bases.shape)} and row_bytes {tuple(a.row_bytes.shape)}, expected [buffers] both"
    if a.src.dim() != 1 or a.src.shape != a.dst.shape:
        yield f"src is {tuple(a.src.shape)} and dst {tuple(a.dst.shape)}, expected [capacity] both"
    if a.entries is not None and a.entries.numel() != 1:
        yield f"entries has {a.entries.numel()} elements, expected 1"
    if a.longest < PIECE_BYTES or a.longest % PIECE_BYTES:
        yield f"rows of up to {a.longest} bytes, expected a multiple of {PIECE_BYTES}"
    if a.slots < 1:
        yield f"{a.slots} slots, expected at least 1"
    if not 0 <= a.group <= MAX_GROUP:
        yield f"groups of {a.group} entries are not within 0 .. {MAX_GROUP}"
    yield from not_dense(bases=a.bases, row_bytes=a.row_bytes, src=a.src, dst=a.dst, entries=a.entries)


def _move_cuda(*args: Any) -> None:
    a = MoveArgs(*args)
    check(_problems(a))
    params = abi.MoveParams(
        bases=a.bases.data_ptr(),
        row_bytes=a.row_bytes.data_ptr(),
        src=a.src.data_ptr(),
        dst=a.dst.data_ptr(),
        count=None if a.entries is None else a.entries.data_ptr(),
        slots=a.slots,
        index_bytes=INDEX_BYTES[a.src.dtype],
        capacity=a.src.numel(),
        group=a.group,
        buffers=a.bases.numel(),
        longest=a.longest,
    )
    launch("kv_move", params, a.src.device)


def _move_cpu(*args: Any) -> None:
    a = MoveArgs(*args)
    check(_problems(a))
    count = a.src.numel() if a.entries is None else min(max(int(a.entries), 0), a.src.numel())
    moves = reference.Moves.of(a.src[:count], a.dst[:count], a.slots, a.group)
    check(moves.problems())
    for base, row_bytes in zip(a.bases.tolist(), a.row_bytes.tolist(), strict=True):
        moves.apply(base, row_bytes)


def _nothing(*args: Any) -> None:
    """Fake: it returns nothing."""


_lib.impl("kv_move", _move_cuda, "CUDA")
_lib.impl("kv_move", _move_cpu, "CPU")
torch.library.register_fake("treeverify::kv_move", _nothing, lib=_lib)

kv_move = torch.ops.treeverify.kv_move
