# SPDX-License-Identifier: Apache-2.0
"""Times a function as a server runs it: replayed from a CUDA graph, with a cold L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

FLUSH_BYTES = 256 << 20
"""Several times any L2."""


class TooSlow(Exception):
    """One run took longer than the cap."""


class Timer(Protocol):
    """Median microseconds of a run."""

    def __call__(self, run: Callable[[], object]) -> float: ...


class GraphTimer:
    """Median of CUDA-graph replays, the L2 flushed before each.

    Args:
        cap_ms: a function whose single run takes longer is not timed.
        share_ms: replays are repeated within this much device time, 3 to `most` times.
    """

    def __init__(self, cap_ms: float = 400, share_ms: float = 50, most: int = 20) -> None:
        self.cap_ms, self.share_ms, self.most = cap_ms, share_ms, most
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], object]) -> float:
        """Microseconds.

        Raises:
            TooSlow: see `cap_ms`.
        """
        run()  # compiles, loads, allocates
        once = self._elapsed_us(run) / 1e3
        if once > self.cap_ms:
            raise TooSlow(f"one run takes {once:.0f} ms, more than the cap of {self.cap_ms:.0f}")
        graph = self._capture(run)
        graph.replay()  # uploads it
        repeats = max(3, min(self.most, int(self.share_ms / max(once, 1e-3))))
        return statistics.median(self._elapsed_us(graph.replay) for _ in range(repeats))

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """As torch.cuda.graph, which also empties the allocator's cache: thousands of rows would wait for that."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin()
            try:
                run()
            finally:
                graph.capture_end()
        return graph

    def _elapsed_us(self, run: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


class WallClock:
    """Median of plain calls, for a dry run without a GPU: its figures mean nothing."""

    def __call__(self, run: Callable[[], object]) -> float:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)
