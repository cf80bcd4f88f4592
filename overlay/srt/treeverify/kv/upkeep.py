# SPDX-License-Identifier: Apache-2.0
"""Defragments requests while they are served, where a server asks for it (TREEVERIFY_DEFRAG=1) and it pays.

Reading slots in a row is 3 % (32k tokens) to 12 % (200k) faster than reading them at random, on an H200; a move costs
what 8 to 18 steps gain (results/h200/kv.json). With pages of 16 tokens and more there is nothing to gain, and what the
radix cache holds, a prompt's KV as a rule, is never moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .defrag import Moved, defrag, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from sglang.srt.managers.schedule_batch import Req

    from .pools import Mover

DEFRAG = "TREEVERIFY_DEFRAG"


@dataclass(frozen=True)
class Policy:
    """When a request's slots are worth moving."""

    tokens: int = 32768
    """That it alone holds, at least."""
    left: int = 256
    """That it may still write, at least."""
    run: int = 4
    """Slots in a row, on average, at most: longer runs are read as fast as one."""
    steps: int = 64
    """Between two looks; a look waits for the device."""


POLICY = Policy()


class Upkeep:
    """Looks after the slots of one server's running requests."""

    def __init__(self, req_to_token: torch.Tensor, allocator: Any, mover: Mover, policy: Policy | None = None) -> None:
        """Arguments as of defrag(). Ranks of a tensor-parallel group decide alike: by their lists of slots alone."""
        self._req_to_token, self._allocator, self._mover = req_to_token, allocator, mover
        self._policy = policy or POLICY
        self._steps = 0
        self._seen: dict[str, int] = {}
        """Own tokens of a request when it was looked at last: again when there are twice as many."""

    def __call__(self, reqs: Sequence[Req]) -> Moved | None:
        """Between two steps, on their stream: moves the slots of one request at most; what was done."""
        self._steps += 1
        if self._steps % self._policy.steps:
            return None
        self._seen = {req.rid: self._seen.get(req.rid, 0) for req in reqs}
        worth = [req for req in reqs if self._is_worth_a_look(req)]
        if not worth:
            return None
        req = max(worth, key=_own)
        self._seen[req.rid] = _own(req)
        row = self._req_to_token[req.req_pool_idx]
        if pieces_of(row[req.cache_protected_len : req.kv_committed_len]) * self._policy.run < _own(req):
            return None
        return defrag(req, self._req_to_token, self._allocator, self._mover)

    def _is_worth_a_look(self, req: Req) -> bool:
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        return left >= self._policy.left and _own(req) >= max(self._policy.tokens, 2 * self._seen[req.rid])


def _own(req: Req) -> int:
    """Tokens whose slots the request alone holds."""
    return int(req.kv_committed_len - req.cache_protected_len)
