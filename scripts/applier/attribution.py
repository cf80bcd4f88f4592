# SPDX-License-Identifier: Apache-2.0
"""Which patch an edit of a patched file belongs to, and what the file then is after each patch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from applier.errors import DriftError
from applier.hunks import FilePatch, apply_hunks


@dataclass(frozen=True)
class Edit:
    """Lines [`start`, `stop`) of the patched file, counted from 0, were replaced by `new`."""

    start: int
    stop: int
    new: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """Lines [`a0`, `a1`) of a file before a patch are [`b0`, `b1`) after it."""

    a0: int
    a1: int
    b0: int
    b1: int


@dataclass(frozen=True)
class Owner:
    """The patch an edit goes to, by its place in the series, and why."""

    patch: int
    why: str


@dataclass(frozen=True)
class Stages:
    """A file through the patches: `lines[0]` as released, `lines[i + 1]` after `files[i]`; None: doesn't touch it."""

    files: Sequence[FilePatch | None]
    lines: list[list[str]]

    @property
    def steps(self) -> list[list[Step]]:
        return [_steps(file) if file else [] for file in self.files]


def stages(files: Sequence[FilePatch | None], base: list[str]) -> Stages:
    """The file after each patch; HunkError where one doesn't fit."""
    lines = [base]
    for file in files:
        lines.append(apply_hunks(file, lines[-1]) if file else lines[-1])
    return Stages(files, lines)


def owner(through: Stages, edit: Edit) -> Owner | None:
    """The last patch of which the edit changes a line, else the one with the nearest hunk (the later of equals).

    None where no patch touches the file.
    """
    steps = through.steps
    place: tuple[int, int] = (edit.start, edit.stop)
    for i in range(len(steps) - 1, -1, -1):
        back = _back(steps[i], *place)
        if back is None:
            return Owner(i, "changes its lines")
        place = back
    best: tuple[int, int] | None = None
    for i in range(len(steps)):
        for begin, end in _after(steps, i):
            distance = max(0, begin - edit.stop, edit.start - end)
            if best is None or distance <= best[0]:
                best = (distance, i)
    if best is None:
        return None
    distance, i = best
    lines = f"{distance} {'line' if distance == 1 else 'lines'}"
    return Owner(i, f"{lines} from its nearest hunk" if distance else "next to its lines")


def with_edits(through: Stages, edits: Sequence[Edit], owners: Sequence[int], names: Sequence[str]) -> Stages:
    """The file after each patch with every edit in from its owner on.

    DriftError where an edit changes lines that a patch after its owner makes. The `files` are those of `through`.
    """
    steps = through.steps
    lines = list(through.lines)
    places: dict[int, tuple[int, int]] = {i: (edit.start, edit.stop) for i, edit in enumerate(edits)}
    for level in range(len(steps), 0, -1):
        mine = [i for i in places if owners[i] < level]
        lines[level] = _edited(lines[level], [(places[i], edits[i].new) for i in mine])
        for i in mine:
            if owners[i] == level - 1:
                continue
            back = _back(steps[level - 1], *places[i])
            if back is None:
                raise DriftError(
                    f"the edit at line {edits[i].start + 1} changes lines that {names[level - 1]} makes, which comes "
                    f"after {names[owners[i]]}; refresh it into that one, or leave --patch out"
                )
            places[i] = back
    return Stages(through.files, lines)


def _edited(lines: list[str], edits: list[tuple[tuple[int, int], tuple[str, ...]]]) -> list[str]:
    result: list[str] = []
    done = 0
    for (start, stop), new in edits:  # in the file's order
        result += [*lines[done:start], *new]
        done = stop
    return result + lines[done:]


def _steps(file: FilePatch) -> list[Step]:
    found = []
    shift = 0
    for hunk in file.hunks:
        at = hunk.start - 1 if hunk.old else hunk.start
        for kind, a0, a1, b0, b1 in SequenceMatcher(None, hunk.old, hunk.new, autojunk=False).get_opcodes():
            if kind != "equal":
                found.append(Step(at + a0, at + a1, at + shift + b0, at + shift + b1))
        shift += len(hunk.new) - len(hunk.old)
    return found


def _back(steps: list[Step], start: int, stop: int) -> tuple[int, int] | None:
    """A range of the file after a patch, in the file before it; None where the patch made a part of it."""
    shift = 0
    for step in steps:
        if step.b1 <= start:
            shift += (step.a1 - step.a0) - (step.b1 - step.b0)
        elif step.b0 < stop:
            return None
    return start + shift, stop + shift


def _after(steps: list[list[Step]], patch: int) -> list[tuple[int, int]]:
    """Where a patch's changes are in the file after all of them."""
    return [
        (_forward(steps[patch + 1 :], step.b0, False), _forward(steps[patch + 1 :], step.b1, True))
        for step in steps[patch]
    ]


def _forward(later: list[list[Step]], at: int, end: bool) -> int:
    for steps in later:
        shift = 0
        for step in steps:
            if step.a1 <= at:
                shift += (step.b1 - step.b0) - (step.a1 - step.a0)
            elif step.a0 < at:
                at, shift = (step.b1 if end else step.b0), 0
                break
        at += shift
    return at
