# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's log tells of decode steps: a line every so many of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NOT_SAMPLED = "falling back to greedy argmax verification"
"""DFLASH's warning where it cannot verify by sampling."""

NAN = "log-probabilities hold NaN"
"""DDTREE's error where the drafter is broken."""

_PREFILL, _DECODE = "Prefill batch", "Decode batch"
_FIELDS = {
    "requests": r"#running-req: (\d+)",
    "accepted": r"accept len: ([\d.]+)",
    "nodes": r"tree nodes: ([\d.]+)",
    "graph": r"cuda graph: (True|False)",
    "throughput": r"gen throughput \(token/s\): ([\d.]+)",
}
_STAGES = re.compile(r"step ms: ((?:[a-z]+ [\d.]+(?: |(?=,)))+)")


class Line(NamedTuple):
    """A decode line."""

    requests: int
    accepted: float
    """Tokens a step and request, the bonus token among them; 1 without speculation."""
    nodes: float | None
    """Of a draft tree."""
    stages_ms: dict[str, float]
    graph: bool
    """Whether the last step was the replay of a CUDA graph."""
    throughput: float
    """Tokens a second since the line before."""
    follows: bool
    """Whether nothing but decode steps lies between the line before and this one."""


def parse(text: str) -> Iterator[Line]:
    """The decode lines of a log."""
    follows = False
    for line in text.splitlines():
        if _PREFILL in line:
            follows = False
        elif _DECODE in line:
            found = {name: match[1] for name, regex in _FIELDS.items() if (match := re.search(regex, line))}
            words = match[1].split() if (match := _STAGES.search(line)) else []
            yield Line(
                int(found["requests"]),
                float(found.get("accepted", 1)),
                float(found["nodes"]) if "nodes" in found else None,
                dict(zip(words[::2], map(float, words[1::2]), strict=True)),
                found.get("graph") == "True",
                float(found["throughput"]),
                follows,
            )
            follows = True


class Summary(NamedTuple):
    """What the lines of one batch size say together."""

    step_ms: float | None
    """Median wall time of a step, by the scheduler's clock."""
    nodes: float | None
    stages_ms: dict[str, float]
    """Mean device time of each stage of a step."""
    graph: bool
    """Whether all steps seen were replays."""


def summary(lines: Sequence[Line], bs: int) -> Summary:
    """Of the lines of full batches; the first is left out, since it tells of steps before them too."""
    full = [line for line in lines if line.requests == bs][1:]
    whole = [line for line in full if line.follows and line.throughput > 0]
    steps = [1e3 * bs * line.accepted / line.throughput for line in whole]
    nodes = [line.nodes for line in full if line.nodes is not None]
    staged = [line.stages_ms for line in full if line.stages_ms]
    names = list(dict.fromkeys(name for stages in staged for name in stages))
    return Summary(
        statistics.median(steps) if steps else None,
        statistics.mean(nodes) if nodes else None,
        {name: round(statistics.mean(stages.get(name, 0.0) for stages in staged), 4) for name in names},
        bool(full) and all(line.graph for line in full),
    )


class Tail:
    """What is added to a log file from here on.

    Args:
        path: of the file, which others append to.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, path.stat().st_size

    def read(self) -> str:
        """Whole lines added since the call before."""
        with open(self._path, "rb") as file:
            file.seek(self._at)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace")
