# SPDX-License-Identifier: Apache-2.0
"""The dtype contract of a pin, asked of another release: what holds, what moved, what a person must look at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from applier.contract import Checked, check_contract
from applier.pin import DtypeRow, Pin
from applier.tree import Tree

HOLDS = "holds"
MOVED = "moved"  # the same dtype, made in another file
DIFFERS = "differs"
LOST = "lost"


@dataclass(frozen=True)
class Rederived:
    """A row for the new release. It keeps the dtype that the kernels read; `note` says what the source says instead."""

    row: DtypeRow
    state: str
    note: str

    def as_json(self) -> dict[str, Any]:
        row = self.row
        named = {"backend": row.backend, "path": row.path, "name": row.name, "dtype": row.dtype, "file": row.file}
        return {**named, "site": row.site, "state": self.state, "note": self.note}


def rederive(pin: Pin, tree: Tree, moved: dict[str, str]) -> list[Rederived]:
    """Every row of the pin's contract, read off the tree's source. `moved` names files that have another name there."""
    rows = [replace(row, file=moved.get(row.file, row.file)) for row in pin.dtypes]
    checked = check_contract(replace(pin, dtypes=tuple(rows)), tree.read)
    elsewhere = _sites(tree, {item.row.site for item in checked if item.finding is None})
    return [_row(pin, tree, old, item, elsewhere) for old, item in zip(pin.dtypes, checked, strict=True)]


def _row(pin: Pin, tree: Tree, old: DtypeRow, checked: Checked, elsewhere: dict[str, list[str]]) -> Rederived:
    row = checked.row
    if checked.problem is None:
        if row.file == old.file:
            return Rederived(row, HOLDS, "")
        return Rederived(row, MOVED, f"from {old.file}")
    if checked.finding is not None:
        return Rederived(row, DIFFERS, checked.problem)
    files = [file for file in elsewhere.get(row.site, []) if file != row.file]
    tried = tuple(replace(row, file=file) for file in files)
    found = [item for item in check_contract(replace(pin, dtypes=tried), tree.read) if item.finding is not None]
    if len(found) == 1:
        state, note = (MOVED, f"from {old.file}") if found[0].problem is None else (DIFFERS, found[0].problem)
        return Rederived(found[0].row, state, note)
    hint = f"; {row.site} is also in {', '.join(files)}" if files else ""
    return Rederived(row, LOST, checked.problem + hint)


def _sites(tree: Tree, sites: Iterable[str]) -> dict[str, list[str]]:
    """Files that have a class and function of these names."""
    wanted = {site: [re.compile(_pattern(site, i), re.MULTILINE) for i in range(site.count(".") + 1)] for site in sites}
    found: dict[str, list[str]] = {site: [] for site in wanted}
    if not wanted:
        return found
    for path in sorted(tree.path("srt").rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for site, patterns in wanted.items():
            if all(pattern.search(text) for pattern in patterns):
                found[site].append(path.relative_to(tree.package).as_posix())
    return found


def _pattern(site: str, part: int) -> str:
    names = site.split(".")
    kind = "def" if part == len(names) - 1 else "class"
    return rf"^\s*{kind} {re.escape(names[part])}\b"
