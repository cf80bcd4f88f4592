# SPDX-License-Identifier: Apache-2.0
"""Finding the place of a file that looks most like a block of lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

ENOUGH = 0.2  # of a block's distinctive text; below that, what is found is nothing like it


def most_alike(block: Sequence[str], lines: Sequence[str]) -> tuple[int, tuple[str, ...]] | None:
    """The lines that stand where `block` would be, and where they begin (1-based); None where nothing is like it.

    A line counts by how rare it is in the file; indentation doesn't. What was put in between or taken out is found too.
    """
    if not block or not lines:
        return None
    wanted = [line.strip() for line in block]
    have = [line.strip() for line in lines]
    often = Counter(have)
    weight = {line: 1 / often.get(line, 1) for line in wanted if line}
    best, at = _window([weight.get(line, 0.0) for line in have], have, len(block))
    if best < ENOUGH * sum(weight.values()):
        return None
    low, high = max(0, at - len(block)), min(len(lines), at + 2 * len(block))
    pairs = SequenceMatcher(None, wanted, have[low:high], autojunk=False).get_matching_blocks()[:-1]
    first, last = pairs[0], pairs[-1]
    begin = max(0, low + first.b - first.a)
    end = min(len(lines), low + last.b + len(block) - last.a)
    return begin + 1, tuple(lines[begin:end])


def _window(weights: list[float], have: list[str], size: int) -> tuple[float, int]:
    """The window of the greatest weight, a line counted once; the first of equals."""
    inside: Counter[str] = Counter()
    total, best, at = 0.0, 0.0, 0
    for i, weight in enumerate(weights):
        inside[have[i]] += 1
        total += weight * (inside[have[i]] == 1)
        if i >= size:
            gone = have[i - size]
            inside[gone] -= 1
            total -= weights[i - size] * (inside[gone] == 0)
        if total > best + 1e-9:
            best, at = total, max(0, i - size + 1)
    return best, at
