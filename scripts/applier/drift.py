# SPDX-License-Identifier: Apache-2.0
"""The report on a tree that is near a pin: which one, what differs, and what becomes of every patch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from applier.contract import check_contract, problems_of
from applier.errors import UsageError
from applier.fit import CLEAN, CONFLICT, DIFFERS, MERGES, UNKNOWN, UPSTREAM, FileFit, Fit, HunkFit, fit_patches
from applier.gitinfo import head_holds
from applier.layout import CHECKOUT
from applier.linediff import changed_lines
from applier.nearest import closest_pin, nearness, version_of
from applier.pin import Pin, load_pins
from applier.release import Release
from applier.released import released_file
from applier.sidebyside import side_by_side
from applier.state import Difference, State
from applier.tree import Tree

SAYS = {
    CLEAN: "applies cleanly",
    MERGES: "applies by three-way merge (--3way)",
    UPSTREAM: "already upstream: the tree has all it does",
    CONFLICT: "CONFLICT",
    UNKNOWN: "not exact",
}
ROWS = 72  # columns of a conflict, below the indentation of a report


@dataclass(frozen=True)
class Drift:
    """A tree held against a release that it is not."""

    tree: Tree
    release: Release
    fit: Fit
    differs: list[tuple[Difference, str]]
    unmerged: str | None
    contract: list[str]

    @property
    def way(self) -> str:
        """What to do about it, for the end of a sentence."""
        if self.fit.state == CLEAN:
            return "every hunk is exact, so --force applies them"
        if self.fit.state in (MERGES, UPSTREAM):
            return "they apply with --3way"
        if self.fit.state == UNKNOWN:
            return f"some are not exact, and no merge was tried: {self.unmerged}"
        names = ", ".join(patch.name.split("-")[0] for patch in self.fit.named(CONFLICT))
        return f"{names} can't be merged; check out the release, or start a pin of its own with `apply.py port`"

    def lines(self) -> list[str]:
        """The report, for 80 columns."""
        version = version_of(self.tree)
        nearest = closest_pin(self.tree, load_pins(CHECKOUT))
        found = [f"nearest pin: {nearness(self.tree, nearest)}"]
        if nearest.name != self.release.pin.name:
            found.append(f"held against {nearness(self.tree, self.release.pin)}")
        found += [f"the tree says it is SGLang {version}"] * (version not in (None, self.release.pin.pypi))
        found += [line for item, note in self.differs for line in _fitting(f"{item}{note}")]
        found += fit_lines(self.fit, self.release.pin)
        found.append(f"dtype contract: {f'{len(self.contract)} things differ' if self.contract else 'holds'}")
        return found + [f"  {problem}" for problem in self.contract]

    def as_json(self) -> dict[str, Any]:
        pin = self.release.pin
        near = nearness(self.tree, pin)
        return {
            "pin": pin.name,
            "nearest_pin": closest_pin(self.tree, load_pins(CHECKOUT)).name,
            "version": version_of(self.tree),
            "files_as_released": near.same,
            "files_touched": near.touched,
            "differs": [vars(item) for item, _ in self.differs],
            "patches": [patch.as_json() for patch in self.fit.patches],
            "contract": self.contract,
        }


def examine(tree: Tree, release: Release, state: State, fetch: bool) -> Drift:
    """Tries every patch. The release, for merges, is fetched only where it is needed and `fetch` allows it."""
    pin = release.pin
    wanting: list[str] = []
    known: dict[str, bytes | None] = {}

    def released(path: str) -> bytes | None:
        if path in known:
            return known[path]
        known[path] = None
        if shutil.which("git") is None:
            wanting.append("git is not installed")
            return None
        try:
            known[path] = released_file(tree, pin, path, fetch)
        except UsageError as error:
            wanting.append(error.message)
        else:
            if known[path] is None:
                wanting.append(f"{pin.name} is not at hand; `apply.py check` fetches it")
        return known[path]

    fit = fit_patches(release.patches, tree.read, released)
    differs = [(item, _difference(tree, pin, item)) for item in state.unknown]
    contract = problems_of(check_contract(pin, tree.read))
    return Drift(tree, release, fit, differs, wanting[0] if wanting else None, contract)


def fit_lines(fit: Fit, pin: Pin) -> list[str]:
    """A line a patch, with what stands in the way below it."""
    found = []
    for patch in fit.patches:
        found += _fitting(f"{patch.name}: {SAYS[patch.state]}")
        for file in patch.files:
            if file.state != CLEAN:
                found += [f"  {line}" for line in _file_lines(file, pin)]
    return found


def _file_lines(file: FileFit, pin: Pin) -> list[str]:
    if file.why:
        return _fitting(f"{file.path}: {file.why}")
    found = [file.path]
    for hunk in file.hunks:
        if hunk.state == CLEAN:
            continue
        found.append(f"  hunk {hunk.number} at line {hunk.line}: {_hunk(hunk)}")
        if hunk.found is not None:
            heads = (f"expected ({pin.name})", f"found (line {hunk.line})")
            found += [f"    {row}" for row in side_by_side(hunk.hunk.old, hunk.found, heads, ROWS)]
    return found


def _fitting(line: str) -> list[str]:
    """A line about a file or patch, or two or three where it is too long for a terminal."""
    if len(line) <= ROWS:
        return [line]
    path, _, rest = line.partition(": ")
    if len(rest) <= ROWS:
        return [f"{path}:", f"  {rest}"]
    what, _, remark = rest.rpartition(" (")
    if not what:
        return [f"{path}:", f"  {rest}"]
    return [f"{path}:", f"  {what}", f"  ({remark}"]


def _hunk(hunk: HunkFit) -> str:
    what = {MERGES: "merges", UPSTREAM: "already upstream", CONFLICT: "conflict", UNKNOWN: "not exact"}[hunk.state]
    if hunk.state == CONFLICT and hunk.found is None:
        return "conflict, nothing in the file is like it"
    if hunk.state == CONFLICT and hunk.why == DIFFERS:
        return what
    return f"{what}, {hunk.why}" if hunk.why else what


def _difference(tree: Tree, pin: Pin, item: Difference) -> str:
    """How much a file differs, where the release is at hand."""
    notes = []
    data, base = tree.read(item.path), released_file(tree, pin, item.path, fetch=False)
    if data is not None and base is not None and shutil.which("git"):
        added, removed = changed_lines(base, data)
        notes.append(f"+{added} -{removed} lines")
    if item.expected is not None and head_holds(tree, item.path, item.expected):
        notes.append("edited since the commit")
    return f" ({', '.join(notes)})" if notes else ""
