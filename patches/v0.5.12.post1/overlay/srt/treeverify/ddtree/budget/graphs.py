# SPDX-License-Identifier: Apache-2.0
"""The target's CUDA graphs at each width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class Graphs:
    """Graph runners on one attention backend, of which the model runner is given one at a time."""

    def __init__(self, model_runner: ModelRunner, widths: tuple[int, ...]) -> None:
        """Captures those of all widths but the last, which the model runner has.

        Args:
            model_runner: the target's.
            widths: ascending.
        """
        self._model_runner, self._widths = model_runner, widths
        self._capture()

    def _capture(self) -> None:
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

        target = self._model_runner
        self._current = target.graph_runner
        self.runners: dict[int, Any] = {self._widths[-1]: self._current}
        for width in reversed(self._widths[:-1]):  # wide ones first, whose memory the others share
            self.runners[width] = CudaGraphRunner(
                target, attn_backend=target.attn_backend, speculative_num_draft_tokens=width
            )

    def recapture_if_replaced(self) -> None:
        """After an update of the weights SGLang may capture anew, the last width, for which it has arguments."""
        if self._model_runner.graph_runner is not self._current:
            self._capture()

    def switch(self, width: int) -> None:
        """The next target pass is of this width."""
        self._current = self._model_runner.graph_runner = self.runners[width]
