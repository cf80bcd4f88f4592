# SPDX-License-Identifier: Apache-2.0
"""Reads a torch.profiler trace: which kernels ran inside a region, and what made the host wait for the GPU.

Regions are host events by name: a record_function() label, or a Python function where the trace has stacks.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAITS = re.compile(
    r"^(cuda|cu)(Device|Stream|Event|Ctx)Synchronize|^cudaMemcpy(2D|3D)?$|^cuMemcpy(DtoH|HtoD|DtoD)?(_v2)?$|^cudaMemset$"
)
"""Runtime calls that return only when the GPU has done something."""


@dataclass(frozen=True)
class Event:
    """One complete event; times in microseconds."""

    name: str
    category: str
    start: float
    end: float
    thread: tuple[Any, Any]
    correlation: int | None


class Trace:
    """The events of one trace file (.json or .json.gz)."""

    def __init__(self, path: Path) -> None:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            raw = json.load(file)["traceEvents"]
        self.events = [_event(e) for e in raw if e.get("ph") == "X"]
        self.calls = [e for e in self.events if e.category in ("cuda_runtime", "cuda_driver")]
        self.kernels = [e for e in self.events if e.category == "kernel"]
        downloads = (
            e for e in self.events if e.category == "gpu_memcpy" and "DtoH" in e.name and "Pinned" not in e.name
        )
        self._blocking_copies = {e.correlation for e in downloads}

    def regions(self, match: Callable[[str], bool]) -> list[Event]:
        """Host events whose name matches, in time order."""
        host = ("user_annotation", "python_function", "cpu_op")
        return sorted((e for e in self.events if e.category in host and match(e.name)), key=lambda e: e.start)

    def waits(self) -> list[Event]:
        """Runtime calls that made the host wait, downloads into pageable memory included."""
        return [e for e in self.calls if WAITS.match(e.name) or e.correlation in self._blocking_copies]

    def launched_in(self, region: Event) -> Counter[str]:
        """Kernels launched by calls within a region of the host, graph replays included, by short name."""
        mine = {e.correlation for e in self.calls if inside(e, region)}
        return Counter(short(e.name) for e in self.kernels if e.correlation in mine)

    def replayed_in(self, region: Event) -> Counter[str]:
        """The same, graph replays only."""
        mine = {e.correlation for e in self.calls if inside(e, region) and "GraphLaunch" in e.name}
        return Counter(short(e.name) for e in self.kernels if e.correlation in mine)

    def stacks(self, waits: Iterable[Event]) -> Counter[str]:
        """Where the waits come from: the innermost enclosing function of sglang, as file(line): name."""
        frames: dict[tuple[Any, Any], list[Event]] = {}
        for e in self.events:
            if e.category == "python_function" and "sglang" in e.name:
                frames.setdefault(e.thread, []).append(e)
        for mine in frames.values():
            mine.sort(key=lambda e: e.start)
        starts = {thread: [e.start for e in mine] for thread, mine in frames.items()}
        counted: Counter[str] = Counter()
        for wait in waits:
            mine = frames.get(wait.thread, [])
            at = bisect_right(starts.get(wait.thread, []), wait.start)
            inner = next((e for e in reversed(mine[:at]) if e.end >= wait.end), None)
            where = re.sub(r"^.*?(?=sglang/)", "", inner.name) if inner else "outside sglang"
            counted[f"{where} [{wait.name}]"] += 1
        return counted


def inside(event: Event, region: Event) -> bool:
    """Whether a host call was made within a region, on the same thread."""
    return event.thread == region.thread and region.start <= event.start and event.end <= region.end


def short(name: str) -> str:
    """A kernel's name without its arguments."""
    return name.split("(")[0].split("<")[0].removeprefix("void ").strip()


def _event(raw: dict[str, Any]) -> Event:
    start = float(raw["ts"])
    args = raw.get("args", {})
    correlation = args.get("correlation", args.get("External id") if raw.get("cat") == "kernel" else None)
    thread = (raw.get("pid"), raw.get("tid"))
    return Event(raw["name"], raw.get("cat", ""), start, start + float(raw.get("dur", 0)), thread, correlation)
