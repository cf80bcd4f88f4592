# SPDX-License-Identifier: Apache-2.0
"""Commits accepted paths where a request's slots are reserved ahead, without telling the host (SGLang's spec v2).

A step's n nodes lie in the n slots behind a request's prefix. The KV of accepted ones moves to the first of them, where
a chain would have had it (kv/pools.py): the map of slots stays as it is, whatever the size of a page. It must, for a
scheduler that runs ahead of the device may have given a finished request's row of it to another one meanwhile.
"""

from __future__ import annotations

import torch


def behind(table: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor, n: int) -> torch.Tensor:
    """int64 [bs, n]: the slots of the n tokens behind each request's prefix. One gather.

    Args:
        table: int32 [requests, tokens], req_to_token.
        rows: int64 [bs], the requests' rows of it.
        prefix_lens: int64 [bs].
    """
    columns = prefix_lens[:, None] + torch.arange(n, device=prefix_lens.device)
    return table[rows[:, None], columns].long()


def moves(slots: torch.Tensor, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From which slots to which the KV of accepted nodes moves, each int64 [bs * B]; B entries are one group.

    Args:
        slots: int64 [bs, n], of the nodes.
        nodes: int64 [bs, B], Walked.nodes. What is behind a path stays where it is.
    """
    to = slots[:, : nodes.shape[1]]
    origin = torch.where(nodes >= 0, slots.gather(1, nodes.clamp(min=0)), to)
    return origin.flatten(), to.flatten()
