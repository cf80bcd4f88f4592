# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism counts on ranks that do the same: installations are compared at start-up, trees on demand."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ddtree.tree import DraftTree

CHECK = "TREEVERIFY_CHECK_RANKS"
"""Set to 1: ranks compare their draft trees every step, which waits for the GPU; a difference stops the server."""


@functools.cache
def check_installation() -> None:
    """Compares patch set and kernels of all ranks, once a process. A collective: every rank must come here.

    Raises:
        RuntimeError: they differ; all that there is, and on which ranks.
    """
    _compare(_installed(), "patches and kernels", "Apply the same checkout of treeverify on every machine")


def check_trees(tree: DraftTree, step: int) -> None:
    """Compares the draft trees of all ranks. A collective; waits for the device.

    Raises:
        RuntimeError: they differ.
    """
    parts = (tree.tokens, tree.positions, tree.parents, tree.mask, tree.sizes)
    data = b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)
    digest = hashlib.sha256(data).hexdigest()[:16]
    _compare(digest, f"the draft trees of step {step}", "Please report this, with the log of every rank")


def _compare(mine: str, what: str, way_out: str) -> None:
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(group.all_gather_object(mine)):
        ranks.setdefault(theirs, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"rank {', '.join(map(str, where))}: {theirs}" for theirs, where in ranks.items())
        raise RuntimeError(f"treeverify: {what} differ between ranks: {found}. {way_out}.")


def _installed() -> str:
    """Pin, patch set and kernels of this package, as its manifest has them."""
    manifest = Path(__file__).resolve().parent / "_manifest.json"
    if not manifest.exists():
        return "no manifest"
    found = json.loads(manifest.read_text(encoding="utf-8"))
    kernels = found.get("kernels") or {}
    return f"{found['pin']} patches {found['patch_set'][:12]} kernels {(kernels.get('sources') or 'none')[:12]}"
