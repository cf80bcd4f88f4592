# SPDX-License-Identifier: Apache-2.0
"""Two texts side by side, for a terminal of 80 columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from unicodedata import combining, east_asian_width

WIDTH = 78  # two columns are left for the indentation of a report


def side_by_side(left: Sequence[str], right: Sequence[str], heads: tuple[str, str], width: int = WIDTH) -> list[str]:
    """Rows of two columns; between them a space where lines are equal, `|` where they differ, `<` or `>` where one side
    has no such line. Common indentation is left out, long lines go on in the next row; nothing is cut off.
    """
    left, right = _shown(left, right)
    column = (width - 3) // 2
    rows = [_row(heads[0][:column], " ", heads[1][:column], column)]
    for one, mark, other in _pairs(left, right):
        for i, (a, b) in enumerate(zip_longest(_wrapped(one, column), _wrapped(other, column), fillvalue="")):
            rows.append(_row(a, mark if i == 0 else " ", b, column))
    return rows


def _pairs(left: Sequence[str], right: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for one, other in zip_longest(left[a0:a1], right[b0:b1]):
            mark = " " if kind == "equal" else ">" if one is None else "<" if other is None else "|"
            yield one or "", mark, other or ""


def _shown(left: Sequence[str], right: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tabs become spaces, what a terminal would obey is written out; indentation common to all lines is taken off."""
    both = [[_plain(line.rstrip("\n")).expandtabs(4) for line in side] for side in (left, right)]
    indents = [line[: len(line) - len(line.lstrip(" "))] for side in both for line in side if line.strip()]
    common = len(os.path.commonprefix(indents))
    return [line[common:] for line in both[0]], [line[common:] for line in both[1]]


def _plain(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line)


def _cells(c: str) -> int:
    """Columns that a terminal takes for a character."""
    return 0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1


def _wrapped(line: str, column: int) -> list[str]:
    rows, room = [""], column
    for c in line:
        if _cells(c) > room:
            rows.append("")
            room = column
        rows[-1] += c
        room -= _cells(c)
    return rows


def _row(left: str, mark: str, right: str, column: int) -> str:
    return f"{left}{' ' * (column - sum(map(_cells, left)))} {mark} {right}".rstrip()
