# SPDX-License-Identifier: Apache-2.0
"""Starting a pin for another release: what can be carried over is, and what a person must settle is written down.

Works everything out in memory; `commands` writes the new folder in one step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from applier.blob import blob_id
from applier.errors import DriftError, UsageError
from applier.fit import CLEAN, CONFLICT, MERGES, UPSTREAM, FileFit, Fit, fit_patches
from applier.gitinfo import head_commit
from applier.linediff import unified
from applier.moved import Moved, find_moved
from applier.nearest import version_of
from applier.overlayimports import missing_imports
from applier.patchset import decode
from applier.patchtext import hunks_of, parse
from applier.pintext import waiting, with_blobs, with_release, with_rows
from applier.rederive import DIFFERS, LOST, Rederived, rederive
from applier.release import Release, overlay_files
from applier.settling import REPORT, TODO
from applier.tree import Tree

LINT = ("capture.toml", "capture-allow.txt")  # the capture lint's: as before, to begin with
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
REQUIRES = re.compile(r"""^requires-python\s*[=:]\s*"?([^"\n]+)""", re.IGNORECASE | re.MULTILINE)


@dataclass
class Port:
    """`files` maps names in the new pin's folder to contents. `fit` names files as the old release does."""

    name: str
    release: Release
    tree: Tree
    fit: Fit
    moved: dict[str, Moved]
    contract: list[Rederived]
    imports: list[str]
    files: dict[str, bytes] = field(default_factory=dict)

    def path(self, path: str) -> str:
        """A file's name in the new release."""
        moved = self.moved.get(path)
        return moved.now if moved and moved.followed else path

    @property
    def waiting(self) -> list[tuple[str, FileFit, int]]:
        """(patch, file, hunk) of every hunk that did not go in."""
        return [
            (patch.name, file, hunk.number)
            for patch in self.fit.patches
            for file in patch.files
            for hunk in file.hunks
            if hunk.state not in (CLEAN, MERGES, UPSTREAM) or (file.state == CONFLICT and file.why)
        ]

    @property
    def broken(self) -> list[Rederived]:
        return [item for item in self.contract if item.state in (DIFFERS, LOST)]

    @property
    def open(self) -> int:
        """How many things a person must settle."""
        return len(self.waiting) + len(self.broken) + len(self.imports)

    def as_json(self) -> dict[str, Any]:
        return {
            "pin": self.name,
            "from": self.release.pin.name,
            "to_settle": self.open,
            "patches": [patch.as_json() for patch in self.fit.patches],
            "moved": [vars(item) | {"followed": item.followed} for item in self.moved.values()],
            "contract": [item.as_json() for item in self.contract],
            "imports": self.imports,
        }


def plan_port(
    release: Release,
    tree: Tree,
    name: str | None,
    released: Callable[[str], bytes | None],
    report: Callable[[Port], str],
) -> Port:
    """Tries every patch of `release` on `tree`, another release; `released` gives files as the old one has them.

    UsageError where the new pin has no name, or one that can't be a folder's.
    """
    version = version_of(tree)
    if name is None and version is None:
        raise UsageError(f"{tree.package} doesn't say which release it is; name the new pin with --name v0.0.0")
    name = name or f"v{version}"
    if NAME.fullmatch(name) is None:
        raise UsageError(f"a pin can't be named {name!r}: letters, digits, dots, + and - only; say which with --name")
    touched = release.patches.touched
    gone = {path: data for path in touched if tree.read(path) is None and (data := released(path)) is not None}
    moved = find_moved(tree, gone, set(touched) - set(gone))
    port = Port(name, release, tree, Fit(), moved, [], [])
    port.fit = fit_patches(release.patches, lambda path: tree.read(port.path(path)), released)
    names = {path: port.path(path) for path in touched}
    port.contract = rederive(release.pin, tree, {path: now for path, now in names.items() if path != now})
    port.imports = missing_imports(tree, release.overlay)
    _write_patches(port)
    _write_pin(port, version)
    port.files |= {f"overlay/{path}": data for path, data in overlay_files(release.pin.folder / "overlay").items()}
    for file in LINT:
        if (release.pin.folder / file).is_file():
            port.files[file] = (release.pin.folder / file).read_bytes()
    port.files[REPORT] = report(port).encode()
    return port


def _write_patches(port: Port) -> None:
    folder = port.release.pin.folder
    series = []
    for patch, fit in zip(port.release.patches.patches, port.fit.patches, strict=True):
        old = parse(patch.name, (folder / patch.name).read_bytes().decode("utf-8"))
        new, rest = old.pinned(port.name), old.pinned(port.name)
        for file in fit.files:
            before, after = port.fit.steps.get((patch.name, file.path), (b"", b""))
            now = port.path(file.path)
            new.put(now, decode(unified(f"{new.prefix}{now}", before, after)))
            numbers = [hunk for name, of, hunk in port.waiting if name == patch.name and of is file]
            if numbers:
                head, hunks = hunks_of(old.sections[file.path])
                rest.put(file.path, head + "".join(hunks[number - 1] for number in numbers))
        if rest.sections:
            port.files[patch.name + TODO] = rest.render().encode()
        if new.sections:
            port.files[patch.name] = new.render().encode()
            series.append(patch.name)
        elif rest.sections:
            series.append(waiting(patch.name))
        else:
            series.append(f"# {patch.name}: {port.name} has it already")
    port.files["series"] = ("\n".join(series) + "\n").encode()


def _write_pin(port: Port, version: str | None) -> None:
    old, tree = port.release.pin, port.tree
    text = (old.folder / "pin.toml").read_text(encoding="utf-8")
    text = with_release(
        text,
        {
            "name": port.name,
            "tag": port.name,
            "commit": head_commit(tree),
            "pypi": version or port.name.removeprefix("v"),
            "requires_python": _requires_python(tree) or old.requires_python,
        },
    )
    contents = {now: tree.read(now) for now in map(port.path, old.blobs)}
    text = with_blobs(text, {path: blob_id(data) for path, data in contents.items() if data is not None})
    open_rows = (DIFFERS, LOST)
    rows = [(item.row.file, item.note if item.state in open_rows else "") for item in port.contract]
    port.files["pin.toml"] = with_rows(text, rows).encode()


def _requires_python(tree: Tree) -> str | None:
    """What the package says beside itself: an installed one's METADATA, a checkout's pyproject.toml."""
    version = version_of(tree)
    for path in (tree.import_root / f"sglang-{version}.dist-info/METADATA", tree.import_root / "pyproject.toml"):
        if path.is_file() and (match := REQUIRES.search(path.read_text(encoding="utf-8", errors="replace"))):
            return match[1].strip()
    return None


def require_stock(tree: Tree, patched: bool) -> None:
    """A pin is made from a release as released."""
    if patched:
        raise DriftError(
            f"{tree.package} is patched; `apply.py revert` it first, a pin is made from the release itself"
        )
