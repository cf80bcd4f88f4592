# SPDX-License-Identifier: Apache-2.0
"""Applying hunks in memory: at the stated line, with every context line equal, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hunk:
    """`old` lines starting at line `start` (1-based) become `new`. Lines keep their ends."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    section: str = ""


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one patch for one file of the package."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Mismatch:
    """Why a hunk can't go in: the first line that differs, and what else is known."""

    hunk: int
    line: int
    expected: str | None
    found: str | None
    moved_to: int | None
    upstreamed_at: int | None


class HunkError(Exception):
    """Raised by `apply_hunks`; carries every hunk that doesn't fit."""

    def __init__(self, mismatches: list[Mismatch]) -> None:
        super().__init__(f"{len(mismatches)} hunks do not apply")
        self.mismatches = mismatches


def split_lines(text: str) -> list[str]:
    """Lines with their ends, cut at newlines only (str.splitlines also cuts at form feeds)."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def apply_hunks(patch: FilePatch, lines: list[str]) -> list[str]:
    """The file after the patch; HunkError where any hunk's old lines are not at its line."""
    result: list[str] = []
    mismatches: list[Mismatch] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, 1):
        at = hunk.start - 1 if hunk.old else hunk.start
        if at < done or not _fits(hunk, lines, at):
            mismatches.append(_explain(number, hunk, lines, at))
            continue
        result += lines[done:at]
        result += hunk.new
        done = at + len(hunk.old)
    if mismatches:
        raise HunkError(mismatches)
    return result + lines[done:]


def reverse(patch: FilePatch) -> FilePatch:
    """The patch that undoes this one."""
    hunks: list[Hunk] = []
    shift = 0
    for hunk in patch.hunks:
        at = (hunk.start - 1 if hunk.old else hunk.start) + shift
        hunks.append(Hunk(at + 1 if hunk.new else at, hunk.new, hunk.old, hunk.section))
        shift += len(hunk.new) - len(hunk.old)
    return FilePatch(patch.path, tuple(hunks))


def find(block: tuple[str, ...], lines: list[str]) -> list[int]:
    """1-based lines at which `block` stands in the file."""
    if not block:
        return []
    last = len(lines) - len(block)
    return [i + 1 for i in range(last + 1) if lines[i] == block[0] and tuple(lines[i : i + len(block)]) == block]


def state_of(hunks: Iterable[Hunk], lines: list[str]) -> str:
    """ "applied", "absent", "partial" or "drifted", judged by where old and new lines stand."""
    kinds = {"applied" if find(h.new, lines) else "absent" if find(h.old, lines) else "drifted" for h in hunks}
    if len(kinds) == 1:
        return kinds.pop()
    return "drifted" if "drifted" in kinds else "partial"


def _fits(hunk: Hunk, lines: list[str], at: int) -> bool:
    """Whether the old lines stand there, and the new ones leave no line without its end before another."""
    end = at + len(hunk.old)
    if end > len(lines) or tuple(lines[at:end]) != hunk.old:
        return False
    if not hunk.new:
        return True
    return (at == 0 or lines[at - 1].endswith("\n")) and (end == len(lines) or hunk.new[-1].endswith("\n"))


def _explain(number: int, hunk: Hunk, lines: list[str], at: int) -> Mismatch:
    differs = next((i for i, want in enumerate(hunk.old) if at + i >= len(lines) or lines[at + i] != want), 0)
    elsewhere = find(hunk.old, lines)
    upstreamed = find(hunk.new, lines)
    return Mismatch(
        hunk=number,
        line=at + differs + 1,
        expected=hunk.old[differs].rstrip("\n") if hunk.old else None,
        found=lines[at + differs].rstrip("\n") if at + differs < len(lines) else None,
        moved_to=elsewhere[0] if len(elsewhere) == 1 else None,
        upstreamed_at=upstreamed[0] if upstreamed else None,
    )
