# SPDX-License-Identifier: Apache-2.0
"""Makes a server's trees adaptive: graphs of every width, what they cost, and the Budget that chooses."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...gates import TreeRefused, switched_on
from ..algorithm import NAME
from ..masks import MaskForm
from .controller import Budget
from .graphs import Graphs
from .measure import measure
from .widths import ADAPT, BELIEVE, ladder, tokens_believed

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

@dataclass(frozen=True)
class Adaptive:
    """What a worker needs to change its width."""

    budget: Budget
    graphs: Graphs

    def begin(self, batch: ScheduleBatch) -> None:
        """A decode step starts: chooses its width."""
        self.graphs.recapture_if_replaced()
        self.budget.begin(len(batch.seq_lens_cpu), int(batch.seq_lens_cpu.sum()))


def start(model_runner: ModelRunner, mask_form: MaskForm, block: int, tp_rank: int) -> Adaptive | None:
    """Captures and measures; None where ADAPT is not set, or there is one width only.

    Args:
        model_runner: the target's, with its graphs of the largest width.
        mask_form: how its backend takes masks.
        block: tokens of the drafter's block.

    Raises:
        TreeRefused: the server cannot change its width.
    """
    if not switched_on(ADAPT):
        return None
    refuse(model_runner, mask_form)
    ceiling = int(model_runner.server_args.speculative_num_draft_tokens)
    widths = ladder(ceiling, block)
    believed = tokens_believed(os.environ.get(BELIEVE, ""), widths)
    if len(widths) == 1:
        logger.info("treeverify: %s has no effect: a tree of %d is no wider than a block.", ADAPT, ceiling)
        return None
    begin = time.perf_counter()
    graphs = Graphs(model_runner, widths)
    captured = time.perf_counter()
    curve = measure(graphs.runners, model_runner, of_rank_0)
    if tp_rank == 0:
        logger.info(
            "treeverify: %s adapts its trees, %.1f s for graphs and %.1f s to time them. %s", NAME, captured - begin,
            time.perf_counter() - captured, curve.line(),
        )  # fmt: skip
    return Adaptive(Budget(curve, of_rank_0, believed=believed), graphs)


def refuse(model_runner: ModelRunner, mask_form: MaskForm) -> None:
    """Raises TreeRefused where graphs of several widths cannot live side by side."""
    args = model_runner.server_args
    wrong = {
        "needs treeverify's kernels to verify, as SGLang's attention backends keep graphs of one width": (
            mask_form is not MaskForm.PACKED
        ),
        "needs CUDA graphs: drop --disable-cuda-graph": model_runner.graph_runner is None,
        "does not go with --enable-lora, whose graphs are of one width": bool(args.enable_lora),
    }
    for problem, found in wrong.items():
        if found:
            raise TreeRefused(f"treeverify: {ADAPT} {problem}; or unset it for trees of one width.")


def of_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank of tensor parallelism."""
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().broadcast_object(value, src=0)
