# SPDX-License-Identifier: Apache-2.0
"""The widths that a server switches between."""

from __future__ import annotations

ADAPT = "TREEVERIFY_DDTREE_ADAPT"
"""Set to 1: trees as large as they pay, --speculative-num-draft-tokens at most; else always that large."""

BELIEVE = "TREEVERIFY_DDTREE_ADAPT_TOKENS_FOR_TEST"
"""Tokens a step at each width, as in 8:2.9,16:3.4: what to believe in place of what the target takes. For a bench whose
drafter has random weights."""

RUNGS = 4
"""Widths at most: each has graphs of its own, which cost start-up time and memory."""


def ladder(ceiling: int, block: int) -> tuple[int, ...]:
    """Widths from `block` to `ceiling`, ascending, at most RUNGS: halves, or further apart where those would be more.

    Args:
        ceiling: nodes of the largest tree, no fewer than `block`.
        block: tokens of the drafter's block, the width of the chain.
    """
    factor = max(2.0, (ceiling / block) ** (1 / (RUNGS - 1)))
    inner = (round(ceiling / factor**i) for i in range(1, RUNGS - 1))
    return tuple(sorted({block, ceiling, *(width for width in inner if width > block)}))


def tokens_believed(text: str, widths: tuple[int, ...]) -> list[float] | None:
    """BELIEVE's value by width; None where it is empty.

    Raises:
        ValueError: it does not tell of every width.
    """
    if not text:
        return None
    try:
        told = {int(width): float(tokens) for width, tokens in (pair.split(":") for pair in text.split(","))}
        return [told[width] for width in widths]
    except (ValueError, KeyError) as e:
        raise ValueError(
            f"treeverify: {BELIEVE} is {text!r}, expected tokens a step of the widths {widths}, as in 8:2.9,16:3.4"
        ) from e
