# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal: lines that fit, colours where they show."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

WIDTH = 80
"""Columns where nobody says how many there are."""
WIDEST = 100
"""Longer lines are hard to read, however wide the terminal is."""
LABEL = 11
"""Columns of a label with the gap behind it."""

COLOURS = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1"}


def width() -> int:
    """Columns to fill: the terminal's, 80 where the output goes elsewhere."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(40, min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDEST))


def coloured(stream: TextIO) -> bool:
    """Whether a stream takes colours: a terminal does. NO_COLOR turns them off, else FORCE_COLOR on, as in Python."""
    if os.environ.get("NO_COLOR"):
        return False
    if forced := os.environ.get("FORCE_COLOR"):
        return forced not in ("0", "false")
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """`text` in one of COLOURS where the stream (stdout) takes them."""
    if not text or not coloured(stream or sys.stdout):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def wrapped(text: str, indent: str = "", hang: str | None = None) -> list[str]:
    """Lines of prose. Words are never broken: a path or an address may stick out, and stay whole for pasting."""
    return textwrap.wrap(
        text,
        width(),
        initial_indent=indent,
        subsequent_indent=indent if hang is None else hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def field(label: str, text: str, indent: str = "") -> list[str]:
    """A label, and text beside it."""
    lines = wrapped(text, " " * (len(indent) + LABEL))
    if not lines:
        return [f"{indent}{label}"]
    lead = f"{indent}{label}".ljust(len(indent) + LABEL)
    return [lead + lines[0].lstrip(), *lines[1:]]


def columns(rows: Iterable[tuple[str, str]], colours: dict[str, str], indent: str = "  ") -> list[str]:
    """Rows of a word, coloured by `colours`, and text."""
    rows = list(rows)
    first = max((len(word) for word, _ in rows), default=0)
    return [f"{indent}{_padded(word, first, colours)}  {text}" for word, text in rows]


def _padded(word: str, to: int, colours: dict[str, str]) -> str:
    return (paint(word, colours[word]) if word in colours else word) + " " * (to - len(word))
