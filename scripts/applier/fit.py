# SPDX-License-Identifier: Apache-2.0
"""How every patch fits a tree: hunk by hunk, exactly, by a merge, not at all, or already there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from applier.alike import most_alike
from applier.hunks import FilePatch, Hunk, HunkError, Mismatch, apply_hunks, find, split_lines
from applier.merge import merge
from applier.patchset import Patch, PatchSet, decode, encode

CLEAN = "clean"  # every line is where the patch says
MERGES = "3way"  # git's merge with the release brings it in
UPSTREAM = "upstream"  # the tree already has what it does: it can be taken out of the tree, not put in
CONFLICT = "conflict"  # a person must settle it
UNKNOWN = "unknown"  # not exact, and the release is not at hand to merge with

DIFFERS = "its lines differ"
NO_TEXT = "it is no text: it holds null bytes, which git does not merge"
CRLF = "its lines end in CRLF, the release's in LF: convert it (core.autocrlf)"
DISTINCT = 12  # characters, spaces left out

Read = Callable[[str], "bytes | None"]


@dataclass(frozen=True)
class HunkFit:
    """One hunk: `number` counts from 1, `line` is where it stands or should (1-based), `why` is said for people.

    Where it conflicts, or isn't exact and there is nothing to merge with, `found` are the lines of the tree that look
    most like those it expects; None: none do.
    """

    number: int
    state: str
    line: int
    hunk: Hunk
    why: str = ""
    found: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        head = {"hunk": self.number, "state": self.state, "line": self.line, "why": self.why}
        if self.state != CONFLICT and self.found is None:
            return head
        sides = {"expected": self.hunk.old, "found": self.found, "wanted": self.hunk.new}
        return head | {name: lines and [line.rstrip("\n") for line in lines] for name, lines in sides.items()}


@dataclass(frozen=True)
class FileFit:
    """The hunks of one patch for one file."""

    path: str
    state: str
    hunks: tuple[HunkFit, ...]
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        hunks = [hunk.as_json() for hunk in self.hunks]
        return {"path": self.path, "state": self.state, "why": self.why, "hunks": hunks}


@dataclass(frozen=True)
class PatchFit:
    """One patch."""

    name: str
    files: tuple[FileFit, ...]

    @property
    def state(self) -> str:
        return _worst([file.state for file in self.files])

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "files": [file.as_json() for file in self.files]}


@dataclass
class Fit:
    """All patches, in order, and the touched files with every hunk in that goes in.

    `steps` maps (patch, path) to the file before and after that patch.
    """

    patches: list[PatchFit] = field(default_factory=list)
    content: dict[str, bytes] = field(default_factory=dict)
    steps: dict[tuple[str, str], tuple[bytes, bytes]] = field(default_factory=dict)

    @property
    def state(self) -> str:
        return _worst([patch.state for patch in self.patches])

    def named(self, *states: str) -> list[PatchFit]:
        """Patches in one of these states."""
        return [patch for patch in self.patches if patch.state in states]


def fit_patches(patches: PatchSet, read: Read, released: Read | None) -> Fit:
    """Tries every patch on the files that `read` gives. Writes nothing, raises for no conflict.

    `released` gives a file as the pin's release has it, for merges; None where there are to be none. It is asked only
    for files in which a hunk is not exact.
    """
    fit = Fit()
    done: dict[str, list[FilePatch]] = {}
    for patch in patches.patches:
        files = []
        for file in patch.files:
            before = fit.content[file.path] if file.path in fit.content else read(file.path)
            if before is None:
                hunks = tuple(HunkFit(i, CONFLICT, hunk.start, hunk) for i, hunk in enumerate(file.hunks, 1))
                files.append(FileFit(file.path, CONFLICT, hunks, "no such file in the tree"))
                continue
            result, after = _fit_file(file, before, done.get(file.path, []), read, released)
            files.append(result)
            fit.content[file.path] = after
            fit.steps[patch.name, file.path] = (before, after)
            done.setdefault(file.path, []).append(file)
        fit.patches.append(PatchFit(patch.name, tuple(files)))
    return fit


def has_already(tree: bytes, release: bytes, patched: bytes) -> bool:
    """Whether the tree has a change: it can be taken out of it, and putting it in again gives the tree."""
    return taken_back(tree, release, patched) is not None


def taken_back(tree: bytes, release: bytes, patched: bytes) -> bytes | None:
    """The tree without a change that it has; None where it can't be taken out, or putting it in again gives another."""
    without = merge(tree, patched, release)
    back = without is not None and without != tree and merge(without, release, patched) == tree
    return without if back else None


def doubles(hunks: tuple[Hunk, ...], release: bytes, tree: bytes, merged: bytes) -> bool:
    """Whether a merge put lines in that the tree had got already: git takes two places for two changes."""
    for run in (run for hunk in hunks for run in _added(hunk)):
        before, now, then = (len(find(run, split_lines(decode(data)))) for data in (release, tree, merged))
        if before < now < then:
            return True
    return False


def still_valid(path: str, before: bytes, after: bytes) -> bool:
    """Whether a merge left a Python file one that compiles, if it did before (it may be for a newer Python)."""
    return not path.endswith(".py") or _compiles(after) or not _compiles(before)


def standing(patch: Patch, read: Read) -> int:
    """How many of a patch's hunks stand somewhere in the tree, old or new."""
    count = 0
    for file in patch.files:
        if (data := read(file.path)) is not None:
            lines = split_lines(decode(data))
            count += sum(bool(find(hunk.old, lines) or find(hunk.new, lines)) for hunk in file.hunks)
    return count


def _fit_file(
    file: FilePatch, tree: bytes, before: list[FilePatch], read: Read, released: Read | None
) -> tuple[FileFit, bytes]:
    """One patch on one file; `before` are the patches that the release has in it by now."""
    lines = split_lines(decode(tree))
    try:
        after = encode("".join(apply_hunks(file, lines)))
        return FileFit(file.path, CLEAN, tuple(_clean(i, h) for i, h in enumerate(file.hunks, 1))), after
    except HunkError as error:
        wrong = {mismatch.hunk: mismatch for mismatch in error.mismatches}
    told = tuple(_told(i, hunk, wrong.get(i), lines) for i, hunk in enumerate(file.hunks, 1))
    if all(hunk.state == UPSTREAM for hunk in told):
        return FileFit(file.path, UPSTREAM, told), tree
    pristine = released(file.path) if released else None
    if b"\0" in tree:
        return FileFit(file.path, CONFLICT, tuple(_with(hunk, CONFLICT) for hunk in told), NO_TEXT), tree
    disk = split_lines(decode(read(file.path) or b""))
    if pristine is None:
        return FileFit(file.path, UNKNOWN, tuple(_with_found(hunk, disk) for hunk in told)), tree
    base = split_lines(decode(pristine))
    for earlier in before:
        base = apply_hunks(earlier, base)
    release, patched = encode("".join(base)), encode("".join(apply_hunks(file, base)))
    if b"\r\n" in tree and b"\r\n" not in release and tree.count(b"\n") == tree.count(b"\r\n"):
        return FileFit(file.path, CONFLICT, tuple(_with(hunk, CONFLICT) for hunk in told), CRLF), tree
    if has_already(tree, release, patched):
        return FileFit(file.path, UPSTREAM, tuple(_with(hunk, UPSTREAM) for hunk in told)), tree
    merged = merge(tree, release, patched)
    if merged is not None and not doubles(file.hunks, release, tree, merged) and still_valid(file.path, tree, merged):
        return FileFit(file.path, MERGES, tuple(_with(hunk, MERGES) for hunk in told)), merged
    hunks, after = _one_by_one(file, tree, base, told, disk)
    if not still_valid(file.path, tree, after):
        return FileFit(file.path, CONFLICT, hunks, "the merge is no valid Python"), tree
    return FileFit(file.path, CONFLICT if any(hunk.state == CONFLICT for hunk in hunks) else MERGES, hunks), after


def _one_by_one(
    file: FilePatch, tree: bytes, base: list[str], told: tuple[HunkFit, ...], disk: list[str]
) -> tuple[tuple[HunkFit, ...], bytes]:
    """Which hunks of a file make the merge fail, and the file with those in that don't."""
    hunks: list[HunkFit] = []
    after, release = tree, encode("".join(base))
    for hunk, known in zip(file.hunks, told, strict=True):
        patched = encode("".join(apply_hunks(FilePatch(file.path, (hunk,)), base)))
        if has_already(after, release, patched):
            hunks.append(_with(known, UPSTREAM))
            continue
        merged = merge(after, release, patched)
        twice = merged is not None and doubles((hunk,), release, after, merged)
        if merged is None or twice:
            line, found = most_alike(hunk.new if twice else hunk.old, disk) or (known.line, None)
            why = "the tree has the lines it adds, in other surroundings" if twice else known.why
            hunks.append(HunkFit(known.number, CONFLICT, line, hunk, why, found))
        else:
            hunks.append(_with(known, MERGES))
            after = merged
    return tuple(hunks), after


def _clean(number: int, hunk: Hunk) -> HunkFit:
    return HunkFit(number, CLEAN, hunk.start, hunk)


def _told(number: int, hunk: Hunk, mismatch: Mismatch | None, lines: list[str]) -> HunkFit:
    """What a hunk's own lines say, without the release."""
    if mismatch is None:
        return _clean(number, hunk)
    if mismatch.upstreamed_at is not None and not find(hunk.old, lines):
        why = f"the tree has its result at line {mismatch.upstreamed_at}"
        return HunkFit(number, UPSTREAM, mismatch.upstreamed_at, hunk, why)
    if mismatch.moved_to is not None:
        why = f"moved from line {hunk.start} to {mismatch.moved_to}"
        return HunkFit(number, UNKNOWN, mismatch.moved_to, hunk, why)
    return HunkFit(number, UNKNOWN, mismatch.line, hunk, DIFFERS)


def _with(hunk: HunkFit, state: str) -> HunkFit:
    """The hunk with what a merge found; what was certain before stays."""
    if hunk.state in (CLEAN, UPSTREAM):
        return hunk
    return replace(hunk, state=state)


def _with_found(hunk: HunkFit, disk: list[str]) -> HunkFit:
    """A hunk whose lines differ, with those of the tree that look most like them."""
    if hunk.state != UNKNOWN or hunk.why != DIFFERS:
        return hunk
    line, found = most_alike(hunk.hunk.old, disk) or (hunk.line, None)
    return replace(hunk, line=line, found=found)


def _added(hunk: Hunk) -> list[tuple[str, ...]]:
    """Runs of lines that a hunk adds, without those too short to be told from others."""
    codes = SequenceMatcher(None, hunk.old, hunk.new, autojunk=False).get_opcodes()
    runs = [hunk.new[b0:b1] for kind, _, _, b0, b1 in codes if kind in ("insert", "replace")]
    return [run for run in runs if len("".join("".join(run).split())) >= DISTINCT]


def _compiles(data: bytes) -> bool:
    try:
        compile(data, "file", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _worst(states: list[str]) -> str:
    """The state of a whole from those of its parts."""
    for state in (CONFLICT, UNKNOWN):
        if state in states:
            return state
    return states[0] if len(set(states)) == 1 else MERGES if states else CLEAN
