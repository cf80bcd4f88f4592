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
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from applier.blob import blob_id, read
from applier.errors import DriftError
from applier.layout import HOME, JOURNAL, MANIFEST
from applier.tree import Tree

TEMPORARY = ".treeverify-tmp"
MARK = stat.S_ISVTX  # on our folders while a change is under way: tells a killed run's from what somebody else made


@dataclass(frozen=True)
class Change:
    """A file's content before and after; None where it doesn't exist."""

    path: str
    old: bytes | None
    new: bytes | None


@dataclass(frozen=True)
class _Entry:
    """A change as plan.json has it: blob ids for contents."""

    path: str
    old: str | None
    new: str | None


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
        if _marked(tree.path(HOME)) or (owned(tree) and folder.is_dir()):
            tidy(tree)
        return None
    entries = _entries(tree, plan)
    found = {entry.path: _blob(tree.read(entry.path)) for entry in entries}
    edited = [entry.path for entry in entries if found[entry.path] not in (entry.old, entry.new)]
    if edited:
        raise DriftError(
            f"a run was interrupted and these files were edited since; keep your edits elsewhere, "
            f"put back either version from {folder}, then run the command again",
            edited,
        )
    done = all(found[entry.path] == entry.new for entry in entries)
    lost = [entry.path for entry in entries if not done and not _kept(tree, entry.old)]
    if lost:
        raise _damaged(tree, "what these files held before is missing from it", lost)
    for entry in entries:
        tree.path(entry.path + TEMPORARY).unlink(missing_ok=True)
    if done:
        _close(tree)
        return "finished"
    for entry in reversed(entries):
        if found[entry.path] != entry.old:
            _put(tree, entry.path, None if entry.old is None else (folder / entry.old).read_bytes())
    _close(tree)
    return "rolled back"


def pending(tree: Tree) -> bool:
    """Whether an interrupted run waits to be settled."""
    return tree.path(f"{JOURNAL}/plan.json").exists()


def owned(tree: Tree) -> bool:
    """Whether srt/treeverify is this tool's: it has a manifest, or the mark of a change under way."""
    return tree.path(MANIFEST).exists() or _marked(tree.path(HOME)) or _marked(tree.path(JOURNAL))


def tidy(tree: Tree) -> None:
    """Removes what a run leaves in our own folder: byte code, empty folders, the journal; the mark goes last."""
    home, journal = tree.path(HOME), tree.path(JOURNAL)
    applied = tree.path(MANIFEST).exists()
    if not applied:
        os.chmod(home, stat.S_IMODE(home.stat().st_mode) | MARK)
        for cache in sorted(home.rglob("__pycache__")):
            shutil.rmtree(cache)
    shutil.rmtree(journal, ignore_errors=True)
    for folder, _, _ in sorted(os.walk(home), reverse=True):
        if not any(os.scandir(folder)):
            os.rmdir(folder)
    if _marked(home):
        os.chmod(home, stat.S_IMODE(home.stat().st_mode) & ~MARK)


def _open(tree: Tree, changes: list[Change]) -> None:
    folder = tree.path(JOURNAL)
    shutil.rmtree(folder, ignore_errors=True)
    _make_folders(tree, folder)
    for change in changes:
        for data in (change.old, change.new):
            if data is not None and not (folder / blob_id(data)).exists():
                _write(folder / blob_id(data), data)
    entries = [_Entry(change.path, _blob(change.old), _blob(change.new)) for change in changes]
    _write(folder / "plan.new", json.dumps({"changes": [asdict(entry) for entry in entries]}, indent=1).encode())
    os.replace(folder / "plan.new", folder / "plan.json")
    _flush(folder)


def _entries(tree: Tree, plan: bytes) -> list[_Entry]:
    """What plan.json says; DriftError where it can't be read."""
    try:
        entries = [_Entry(**raw) for raw in json.loads(plan)["changes"]]
        for entry in entries:
            if not (
                isinstance(entry.path, str) and isinstance(entry.old, str | None) and isinstance(entry.new, str | None)
            ):
                raise TypeError(f"{entry} is no change")
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(tree, f"plan.json can't be read ({error})") from None
    return entries


def _damaged(tree: Tree, what: str, details: list[str] | None = None) -> DriftError:
    mend = "reinstall the same release (pip install --force-reinstall --no-deps sglang==VERSION)"
    if tree.git_root is not None:
        mend = f"`git -C {tree.git_root} checkout -- {tree.package.relative_to(tree.git_root).as_posix()}`"
    return DriftError(
        f"the journal of an interrupted run, {tree.path(JOURNAL)}, is damaged: {what}; nothing was changed. "
        f"Keep edits of yours elsewhere, {mend}, and delete {tree.path(HOME)}",
        details or [],
    )


def _marked(folder: Path) -> bool:
    return folder.is_dir() and bool(folder.stat().st_mode & MARK)


def _kept(tree: Tree, blob: str | None) -> bool:
    return blob is None or _blob(read(tree.path(JOURNAL) / blob)) == blob


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
    marked = (tree.path(HOME), tree.path(JOURNAL))
    for step in reversed(missing):
        step.mkdir(0o777 | MARK if step in marked else 0o777)
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
