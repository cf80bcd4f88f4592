# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared, and the arguments of their sglang.Engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 8
"""Tokens of the drafter's block, the bonus token among them: the width of the chain."""

WIDTHS = (16, 32, 64, BLOCK)
"""Nodes of the trees, the most telling first."""

BATCHES = (1, 4, 8)
"""Batch sizes, each with a CUDA graph of its own."""

LOG_INTERVAL = 32
"""Decode steps a line of the scheduler's log."""


class Mode(NamedTuple):
    """One server."""

    algorithm: str
    """none, dflash, ddtree, or adaptive: DDTREE with TREEVERIFY_DDTREE_ADAPT=1."""
    width: int
    """Tokens the target sees of a request in a step, the bonus token among them; at most that many, where adaptive."""

    @property
    def name(self) -> str:
        """For people and for file names."""
        return f"{self.algorithm}-{self.width}" if self.speculates else self.algorithm

    @property
    def adapts(self) -> bool:
        return self.algorithm == "adaptive"

    @property
    def speculates(self) -> bool:
        return self.algorithm != "none"


NONE, CHAIN = Mode("none", 1), Mode("dflash", BLOCK)


def tree(width: int) -> Mode:
    """DDTREE with that many nodes."""
    return Mode("ddtree", width)


def adaptive(widths: Sequence[int]) -> list[Mode]:
    """Trees as large as they pay, up to the largest of `widths`; none where these lack one of its own widths."""
    from treeverify.ddtree.budget.widths import ladder

    rungs = ladder(max(widths), BLOCK)
    return [Mode("adaptive", max(widths))] if len(rungs) > 1 and set(rungs) <= set(widths) else []


def accepting(widths: Sequence[int]) -> list[Mode]:
    """Those whose acceptance is measured."""
    return [CHAIN, *map(tree, widths)]


def timed(widths: Sequence[int]) -> list[Mode]:
    """Those whose steps are timed, in order: what is compared most closely, one right after the other."""
    return [NONE, CHAIN, *map(tree, sorted(widths)), *adaptive(widths)]


def engine_arguments(mode: Mode, target: Path, draft: Path, draft_backend: str, port: int) -> dict[str, Any]:
    """Arguments that all stages share: one GPU, FlashInfer MLA, bf16, a CUDA graph for each batch size.

    Args:
        draft_backend: attention backend of the drafter.
        port: first of the ports that the engine may use.
    """
    arguments = {
        "model_path": str(target), "attention_backend": "flashinfer", "sampling_backend": "pytorch",
        "dtype": "bfloat16", "skip_tokenizer_init": True, "disable_piecewise_cuda_graph": True,
        "cuda_graph_bs": list(BATCHES), "cuda_graph_max_bs": max(BATCHES), "max_running_requests": max(BATCHES),
        "decode_log_interval": LOG_INTERVAL, "random_seed": 0, "log_level": "info",
        "port": port, "nccl_port": port + 50,
    }  # fmt: skip
    if mode.speculates:
        arguments |= {
            "speculative_algorithm": "DDTREE" if mode.adapts else mode.algorithm.upper(),
            "speculative_draft_model_path": str(draft),
            "speculative_draft_attention_backend": draft_backend,
            "speculative_num_draft_tokens": mode.width,
        }
    return arguments
