# SPDX-License-Identifier: Apache-2.0
"""The width that gives the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence

SLACK = 0.01
"""A width is left for another one only where that is better by more than this: estimates move, graphs stay warm."""


def rates(bs: int, tokens: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Tokens a second of a batch at each width.

    Args:
        bs: requests.
        tokens: of a request and step, the bonus token among them, by width.
        seconds: of a whole step, by width.
    """
    return [bs * mine / duration for mine, duration in zip(tokens, seconds, strict=True)]


def best(rates: Sequence[float], current: int | None = None, slack: float = SLACK) -> int:
    """Index of the highest rate, the first of equal ones; `current` where that is as good but for the slack."""
    first = max(range(len(rates)), key=rates.__getitem__)
    return current if current is not None and rates[current] * (1 + slack) >= rates[first] else first
