# SPDX-License-Identifier: Apache-2.0
"""Changing many files so that a crash at any point can be undone.

Order of a run: contents of both sides are written into the journal folder and flushed; plan.json appears by rename
(from here the run counts); files are replaced one by one; plan.json is removed (the run is over); the rest is cleaned.
Whoever finds plan.json next finishes the run when every file has its new content, and takes it back otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from applier.blob import blob_id, read
from applier.errors import DriftError
from applier.layout import HOME, JOURNAL, MANIFEST
from applier.tree import Tree

TEMPORARY = ".treeverify-tmp"


@dataclass(frozen=True)
class Change:
    """A file's content before and after; None where it doesn't exist."""

    path: str
    old: bytes | None
    new: bytes | None


def carry_out(tree: Tree, changes: list[Change]) -> bool:
    """Makes all changes or none; False where all were there already.

    DriftError where a file is neither old nor new; OSError where writing fails, with everything taken back.
    """
    now = {change.path: tree.read(change.path) for change in changes}
    moved = [change.path for change in changes if now[change.path] not in (change.old, change.new)]
    if moved:
        raise DriftError("files changed while the command ran; nothing was written", moved)
    changes = [
        Change(change.path, now[change.path], change.new) for change in changes if now[change.path] != change.new
    ]
    if not changes:
        return False
    try:
        _open(tree, changes)
        for change in changes:
            _put(tree, change.path, change.new)
    except BaseException:  # a full disk, Ctrl-C: taken back at once where that is possible, by the next command else
        heal(tree)
        raise
    _close(tree)
    return True


def heal(tree: Tree) -> str | None:
    """Settles an interrupted run; says "rolled back" or "finished", None where there was nothing to do."""
    folder = tree.path(JOURNAL)
    plan = read(folder / "plan.json")
    if plan is None:
        if tree.path(HOME).is_dir() and not tree.path(MANIFEST).exists():
            tidy(tree)
        elif folder.is_dir():
            shutil.rmtree(folder)
        return None
    entries = json.loads(plan)["changes"]
    found = {entry["path"]: _blob(tree.read(entry["path"])) for entry in entries}
    edited = [entry["path"] for entry in entries if found[entry["path"]] not in (entry["old"], entry["new"])]
    if edited:
        raise DriftError(
            f"a run was interrupted and these files were edited since; keep your edits elsewhere, "
            f"put back either version from {folder}, then run the command again",
            edited,
        )
    for entry in entries:
        tree.path(entry["path"] + TEMPORARY).unlink(missing_ok=True)
    if all(found[entry["path"]] == entry["new"] for entry in entries):
        _close(tree)
        return "finished"
    for entry in reversed(entries):
        if found[entry["path"]] != entry["old"]:
            _put(tree, entry["path"], None if entry["old"] is None else (folder / entry["old"]).read_bytes())
    _close(tree)
    return "rolled back"


def pending(tree: Tree) -> bool:
    """Whether an interrupted run waits to be settled."""
    return tree.path(f"{JOURNAL}/plan.json").exists()


def tidy(tree: Tree) -> None:
    """Removes what a run leaves in our own folder: journal remains, byte code, empty folders."""
    home = tree.path(HOME)
    shutil.rmtree(tree.path(JOURNAL), ignore_errors=True)
    if not tree.path(MANIFEST).exists():
        for cache in sorted(home.rglob("__pycache__")):
            shutil.rmtree(cache)
    for folder, _, _ in sorted(os.walk(home), reverse=True):
        if not any(os.scandir(folder)):
            os.rmdir(folder)


def _open(tree: Tree, changes: list[Change]) -> None:
    folder = tree.path(JOURNAL)
    shutil.rmtree(folder, ignore_errors=True)
    _make_folders(tree, folder)
    for change in changes:
        for data in (change.old, change.new):
            if data is not None and not (folder / blob_id(data)).exists():
                _write(folder / blob_id(data), data)
    entries = [{"path": c.path, "old": _blob(c.old), "new": _blob(c.new)} for c in changes]
    _write(folder / "plan.new", json.dumps({"changes": entries}, indent=1).encode())
    os.replace(folder / "plan.new", folder / "plan.json")
    _flush(folder)


def _close(tree: Tree) -> None:
    folder = tree.path(JOURNAL)
    (folder / "plan.json").unlink()
    _flush(folder)
    tidy(tree)


def _put(tree: Tree, rel: str, data: bytes | None) -> None:
    """Replaces, creates or removes one file in one step, keeping mode and owner of what was there."""
    path = tree.path(rel)
    if data is None:
        path.unlink(missing_ok=True)
        _flush(path.parent)
        return
    _make_folders(tree, path.parent)
    temporary = tree.path(rel + TEMPORARY)
    before = path.stat() if path.exists() else None
    _write(temporary, data)
    if before is not None:
        os.chmod(temporary, before.st_mode & 0o7777)
    _own(temporary, before or tree.package.stat())
    os.replace(temporary, path)
    _flush(path.parent)


def _make_folders(tree: Tree, folder: Path) -> None:
    missing = [step for step in (folder, *folder.parents) if not step.exists()]
    for step in reversed(missing):
        step.mkdir()
        _own(step, tree.package.stat())


def _own(path: Path, like: os.stat_result) -> None:
    """Root patching somebody's tree leaves it theirs."""
    if os.geteuid() == 0 and (like.st_uid, like.st_gid) != (0, os.getegid()):
        os.chown(path, like.st_uid, like.st_gid)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blob(data: bytes | None) -> str | None:
    return None if data is None else blob_id(data)
