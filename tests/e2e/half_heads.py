# SPDX-License-Identifier: Apache-2.0
"""Times one GPU's share of a layer's attention beside the whole, for two_gpus.py: 64 heads, and the 32 of tp 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "overlay" / "srt"), str(ROOT / "scripts")]

WHOLE, SHARE, AT_MOST = 64, 32, 0.65
CONTEXT, N, BATCHES = 100_000, 9, (1, 8)


def measure(
    gpu: int, context: int = CONTEXT, batches: Sequence[int] = BATCHES, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Rows of scripts/bench with `us`, on the path and with the split counts that a server takes by itself.

    Args:
        gpu: the number it is called by in the rows; the process's current one is timed.
        device: "cpu" is a dry run.
    """
    import torch
    from bench.jobs import Job
    from bench.measure import Bench
    from bench.problems import Problems
    from bench.shapes import Shape
    from bench.timer import GraphTimer, Timer, WallClock
    from treeverify.attention import paths

    cuda = device == "cuda"
    place = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timer: Timer = GraphTimer(share_ms=100) if cuda else WallClock()
    problems = Problems(max(batches) * (context + 64), place)
    bench = Bench(problems, timer, {}, torch.cuda.get_device_name() if cuda else "cpu")
    path = paths.target(place).name
    shapes = [Shape(bs, heads, N, context) for bs in batches for heads in (WHOLE, SHARE)]
    return [{"gpu": gpu, **bench(Job(path, shape))} for shape in shapes]
