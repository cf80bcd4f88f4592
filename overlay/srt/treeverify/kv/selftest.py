# SPDX-License-Identifier: Apache-2.0
"""kv_move on this machine's GPU against its CPU implementation; part of `treeverify.selftest`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import ops
from .pools import Buffers

SHAPES = [(8, 15, (1152,) * 61), (3, 255, (1152, 576, 2048, 2048)), (500, 0, (1152, 2048))]
"""Groups (of 0: moves of their own), moves in each, bytes of a row of each buffer."""

SLOTS = 4096


def rows(seed: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """One row a shape: whether every byte is where it belongs. The rows of a group take each other's place."""
    for groups, group, widths in SHAPES:
        generator = torch.Generator().manual_seed(seed)
        here = [torch.randint(256, (SLOTS, width), dtype=torch.uint8, generator=generator) for width in widths]
        there = [tensor.to(device, copy=True) for tensor in here]
        src, dst = _rings(groups, group, generator)
        for tensors in (here, there):
            to = Buffers.of(tensors)
            lists = [slots.to(tensors[0].device) for slots in (src, dst)]
            ops.kv_move(to.bases, to.row_bytes, to.longest, to.slots, *lists, None, group)
        wrong = [i for i, (a, b) in enumerate(zip(here, there, strict=True)) if not torch.equal(a, b.cpu())]
        yield {
            "bs": groups, "n": group, "variant": "moved KV", "buffers": len(widths), "wrong_buffers": wrong,
            "ok": not wrong,
        }  # fmt: skip


def _rings(groups: int, group: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """src and dst, int64: all rows of a group one place on; those of their own to slots that nobody leaves."""
    slots = torch.randperm(SLOTS, generator=generator)
    if group == 0:
        return slots[:groups], slots[groups : 2 * groups]
    src = slots[: groups * group].view(groups, group)
    return src.flatten(), src.roll(1, 1).flatten()
