# SPDX-License-Identifier: Apache-2.0
"""Keeps the accepted paths of a verify step and frees the rest.

Every node of a tree has a slot of the KV pool. The slots of an accepted path become the request's next tokens, in path
order; all others are freed, each exactly once. With pages of one token that is a permutation: no KV moves.
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


@dataclass(frozen=True)
class Commit:
    """The accepted paths of a batch, on the device."""

    order: torch.Tensor
    """int64 [bs * n]: all rows of the verify pass, those that stay first."""
    lengths: torch.Tensor
    """int64 [bs]."""
    bonus: torch.Tensor
    """int64 [bs]."""
    lengths_cpu: list[int]

    @classmethod
    def of(cls, accepted: Sequence[Accepted], n: int, device: torch.device) -> Commit:
        """From each request's part; n nodes a tree. One copy to the device."""
        kept = np.array([b * n + node for b, mine in enumerate(accepted) for node in mine.nodes])
        freed = np.delete(np.arange(len(accepted) * n), kept)
        lengths = [len(mine.nodes) for mine in accepted]
        packed = torch.from_numpy(np.concatenate([kept, freed, lengths, [mine.bonus for mine in accepted]]))
        if device.type == "cuda":
            packed = packed.pin_memory()
        bs = len(accepted)
        order, lengths_there, bonus = packed.to(device, non_blocking=True).split([bs * n, bs, bs])
        return cls(order, lengths_there, bonus, lengths)

    def apply(self, batch: ScheduleBatch) -> Kept:
        """Moves the batch past the committed tokens: pool, req_to_token, sequence lengths, accounting."""
        total = sum(self.lengths_cpu)
        slots = batch.out_cache_loc[self.order]
        batch.out_cache_loc = slots[:total]
        batch.token_to_kv_pool_allocator.free(slots[total:])
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
        batch.seq_lens_sum += total
        return Kept(self.order[:total], self.lengths.to(torch.int32), self.bonus, max(self.lengths_cpu))
