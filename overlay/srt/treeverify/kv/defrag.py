# SPDX-License-Identifier: Apache-2.0
"""Makes the slots of a running request contiguous.

What the request alone holds, from cache_protected_len on, moves into a run of free pages; slots of the radix cache stay
where they are. The run is free and what is moved is not, so the moves have no order. When it pays: upkeep.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from .pools import Mover


@dataclass(frozen=True)
class Moved:
    """What was done for a request."""

    tokens: int
    """Slots moved."""
    pieces: int
    """Runs of slots they were in before; there is one now."""


@dataclass(frozen=True)
class Window:
    """The compact draft cache of a request: its last tokens, in a table of the drafter's own."""

    req_to_token: torch.Tensor
    """int32 [requests, tokens], the drafter's."""
    tokens: int
    """Of the request in it, from column 0: the drafter's resident length."""


def defrag(
    req: Req, req_to_token: torch.Tensor, allocator: Any, mover: Mover, window: Window | None = None
) -> Moved | None:
    """Moves the request's own slots together. Between two steps only, on the steps' stream; waits for the device.

    Args:
        req: decoding: its prefill is over, and no draft of it is under way.
        req_to_token: int32 [requests, tokens], the target's.
        allocator: SGLang's own, of tokens or of pages.
        mover: of all pools that have the allocator's slots.
        window: where the drafter keeps one.

    Returns:
        None where nothing was done: the slots follow each other already, or no run of free pages is long enough.

    Raises:
        ValueError: an allocator of another kind, or a request with slots beyond its committed tokens.
    """
    _check(req, allocator)
    page, begin, end = allocator.page_size, req.cache_protected_len, req.kv_committed_len
    row = req_to_token[req.req_pool_idx]
    old = row[begin:end].to(torch.int64)
    pieces = pieces_of(old)
    if pieces <= 1:
        return None
    pages = -(-len(old) // page)
    first = _take_run(allocator, pages)
    if first is None:
        return None
    new = torch.arange(first * page, first * page + len(old), dtype=torch.int64, device=old.device)
    mover(old, new)
    row[begin:end] = new.to(row.dtype)
    if len(req.prefix_indices) > begin:  # its prefill's own tail
        req.prefix_indices = row[: len(req.prefix_indices)].to(torch.int64)
    if window is not None:
        window.req_to_token[req.req_pool_idx, : window.tokens] = row[end - window.tokens : end]
    allocator.free(old)
    return Moved(len(old), pieces)


def pieces_of(slots: torch.Tensor) -> int:
    """Runs of consecutive slots. Waits for the device."""
    return int((slots.diff() != 1).sum()) + 1 if len(slots) else 0


def _check(req: Req, allocator: Any) -> None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        raise ValueError(
            f"treeverify: slots of {type(allocator).__name__} cannot be moved together, only those of "
            "TokenToKVPoolAllocator and PagedTokenToKVPoolAllocator"
        )
    if req.kv_allocated_len != req.kv_committed_len:
        raise ValueError(
            f"treeverify: request {req.rid} has {req.kv_allocated_len} slots for {req.kv_committed_len} committed "
            "tokens; its slots are moved between two steps only"
        )
    if req.cache_protected_len % allocator.page_size:
        raise ValueError(
            f"treeverify: the radix cache holds {req.cache_protected_len} tokens of request {req.rid}, expected whole "
            f"pages of {allocator.page_size}"
        )


def _take_run(allocator: Any, pages: int) -> int | None:
    """Takes so many consecutive pages out of the allocator's lists, the first run that there is; its first page."""
    free = torch.cat([allocator.free_pages, allocator.release_pages]).sort().values
    if len(free) < pages:
        return None
    starts = (free[pages - 1 :] - free[: len(free) - pages + 1] == pages - 1).nonzero()
    if not len(starts):
        return None
    first = int(free[starts[0, 0]])
    for name in ("free_pages", "release_pages"):
        listed = getattr(allocator, name)
        setattr(allocator, name, listed[(listed < first) | (listed >= first + pages)])
    return first
