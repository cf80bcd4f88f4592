# SPDX-License-Identifier: Apache-2.0
"""Keeps the accepted paths of a verify step and frees the rest.

Every node of a tree has a slot of the KV pool; that of node i is mapped where the i-th token of a chain would be. All
slots that the request does not keep are freed, each exactly once.

With pages of one token the slots of an accepted path become the request's next tokens, in path order: no KV moves, and
that stays so, for a slot is as good as any other there. With larger pages a request's slots must follow each other
within a page, so the path's KV moves to the slots that a chain would have had, and what is freed is whole pages behind
them, as DFLASH does. The drafter's pool has nothing to be moved: it gets the KV of committed tokens afterwards, in
their new slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from ..kv.pools import Mover
    from .tree import Path


class Accepted(NamedTuple):
    """One request's part of a step."""

    nodes: list[int]
    """Of its tree, in path order: their slots and hidden states stay."""
    bonus: int
    """The token the next step starts from."""


def accept(req: Req, path: Path, think_end: int | None) -> Accepted:
    """Appends the tokens of a path to a request's output, up to where it finishes (stop token, length, abort).

    Args:
        think_end: the token that ends the target's reasoning, None where it has none.
    """
    appended = 0
    for token in path.tokens:
        req.output_ids.append(token)
        appended += 1
        if req.require_reasoning and think_end is not None:
            req.update_reasoning_tokens(token, think_end)
        req.check_finished()
        if req.finished():
            break
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += appended - 1
    req.update_spec_correct_drafts_histogram(appended - 1)
    return Accepted(path.nodes[:appended], req.output_ids[-1])


class Kept(NamedTuple):
    """What a step leaves for the next one."""

    rows: torch.Tensor
    """int64 [sum of lengths]: rows of the verify pass, in path order."""
    lengths: torch.Tensor
    """int32 [bs]: tokens committed."""
    bonus: torch.Tensor
    """int64 [bs]."""
    longest: int
    """The greatest length."""

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [all rows] of each request's rows, [bs, longest]: its last one again where it has fewer."""
        ends = self.lengths.long().cumsum(0)[:, None]
        steps = torch.arange(self.longest, device=ends.device)
        return values[self.rows[torch.minimum(ends - self.lengths[:, None] + steps, ends - 1)]]


class Places(NamedTuple):
    """Where a batch's committed tokens go; all are rows of the verify pass."""

    nodes: Sequence[int]
    """The accepted nodes, in path order, request after request."""
    kept: Sequence[int]
    """Whose slots hold them afterwards."""
    freed: Sequence[int]
    """Whose slots nobody holds afterwards."""
    moves: Sequence[Sequence[tuple[int, int]]]
    """KV from row to row, of each request."""


def places(paths: Sequence[Sequence[int]], n: int, prefix_lens: Sequence[int], page_size: int) -> Places:
    """Of accepted paths, n nodes a tree.

    Args:
        prefix_lens: tokens of each request before the step.
        page_size: 1: the nodes keep their slots.
    """
    nodes = [b * n + node for b, path in enumerate(paths) for node in path]
    if page_size == 1:
        return Places(nodes, nodes, np.delete(np.arange(len(paths) * n), nodes), [()] * len(paths))
    rows, steps, prefixes = np.arange(len(paths) * n).reshape(-1, n), np.arange(n), np.array(prefix_lens)
    lengths = np.array([len(path) for path in paths])
    # The page that the last committed token is in stays, as far as it was allocated.
    stay = -(-(prefixes + lengths) // page_size) * page_size - prefixes
    moves = [[(b * n + node, b * n + i) for i, node in enumerate(path) if node != i] for b, path in enumerate(paths)]
    return Places(nodes, rows[steps < lengths[:, None]], rows[steps >= stay[:, None]], moves)


@dataclass(frozen=True)
class Commit:
    """The accepted paths of a batch, on the device."""

    nodes: torch.Tensor
    """int64 [sum of lengths]: rows of the verify pass, in path order."""
    places: torch.Tensor
    """int64: rows of it that keep their slots, those that lose them, those that KV comes from, those it goes to."""
    sizes: list[int]
    """Of these four."""
    group: int
    """Moves of each request, those from a row to itself among them."""
    lengths: torch.Tensor
    """int64 [bs]."""
    bonus: torch.Tensor
    """int64 [bs]."""
    lengths_cpu: list[int]

    @classmethod
    def of(
        cls, accepted: Sequence[Accepted], n: int, device: torch.device, prefix_lens: Sequence[int], page_size: int
    ) -> Commit:
        """From each request's part; see places(). One copy to the device."""
        at = places([mine.nodes for mine in accepted], n, prefix_lens, page_size)
        group = max(map(len, at.moves))
        pairs = [pair for b, mine in enumerate(at.moves) for pair in [*mine, *[(b * n, b * n)] * (group - len(mine))]]
        parts: list[Sequence[int]] = [at.kept, at.freed, [a for a, _ in pairs], [b for _, b in pairs]]
        sizes, lengths = [len(part) for part in parts], [len(mine.nodes) for mine in accepted]
        rest = [[] if at.nodes is at.kept else at.nodes, lengths, [mine.bonus for mine in accepted]]
        packed = torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in (*parts, *rest)]))
        if device.type == "cuda":
            packed = packed.pin_memory()
        there = packed.to(device, non_blocking=True)
        rows, nodes, lengths_there, bonus = there.split([sum(sizes), *map(len, rest)])
        if at.nodes is at.kept:
            nodes = rows[: sizes[0]]
        return cls(nodes, rows, sizes, group, lengths_there, bonus, lengths)

    def apply(self, batch: ScheduleBatch, mover: Mover | None) -> Kept:
        """Moves the batch past the committed tokens: pool, req_to_token, sequence lengths, accounting.

        Args:
            mover: of the target's pool, where pages are larger than a token.
        """
        batch.out_cache_loc, freed, src, dst = batch.out_cache_loc[self.places].split(self.sizes)
        if self.group:
            assert mover is not None, "only where pages are larger is KV moved"
            mover(src, dst, group=self.group)
        batch.token_to_kv_pool_allocator.free(freed)
        for req, length in zip(batch.reqs, self.lengths_cpu, strict=True):
            req.kv_committed_len += length
            req.kv_allocated_len = req.kv_committed_len
        lengths = self.lengths.to(batch.seq_lens.dtype)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + lengths,
            batch.out_cache_loc,
            batch.batch_size(),
        )
        batch.seq_lens.add_(lengths)
        batch.seq_lens_cpu.add_(torch.tensor(self.lengths_cpu, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(self.lengths_cpu)
        return Kept(self.nodes, self.lengths.to(torch.int32), self.bonus, max(self.lengths_cpu))
