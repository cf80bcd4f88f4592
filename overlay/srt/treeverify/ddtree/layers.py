# SPDX-License-Identifier: Apache-2.0
"""Which targets trees can be verified on: by what their layers take a row of a pass for, and by their KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..compat import SPEC_V2, is_recurrent
from ..gates import TreeRefused
from ..kv.pools import Mover, Unmovable
from .algorithm import NAME

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def refuse_layers(target: ModelRunner) -> None:
    """Raises TreeRefused for layers that take rows for positions: siblings would be each other's past."""
    if is_recurrent(target):
        layers = "recurrent layers (Mamba, linear attention), whose state follows one chain"
    elif target.sliding_window_size is not None:
        layers = "sliding-window layers, whose window counts rows and not positions"
    else:
        return
    raise TreeRefused(f"treeverify: {NAME} cannot serve a target with {layers}; pass --speculative-algorithm DFLASH")


def mover_of(target: ModelRunner) -> Mover:
    """Raises TreeRefused where the target's KV cannot be moved."""
    try:
        return Mover(target.token_to_kv_pool)
    except Unmovable as e:
        way_out = "--speculative-algorithm DFLASH" if SPEC_V2 else "--page-size 1, with which nothing is moved"
        raise TreeRefused(f"{e}; pass {way_out}") from e
