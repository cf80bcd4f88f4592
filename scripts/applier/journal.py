# SPDX-License-Identifier: Apache-2.0
"""Changing many files so that a crash at any point can be undone.

Order of a run: contents of both sides are written into the journal folder, with the modes they will have, and flushed;
plan.json appears by rename (from here the run counts); the new contents are renamed into their places one by one, which
takes no room on the disk; plan.json is removed (the run is over); the rest is cleaned.
Whoever finds plan.json next finishes the run when every file has its new content, and takes it back otherwise, by
renaming the old contents.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from applier import names
from applier.blob import blob_id, read
from applier.errors import DriftError, UsageError
from applier.layout import HOME, JOURNAL, MANIFEST
from applier.tree import Tree, command_line

TEMPORARY = ".treeverify-tmp"  # beside a file that lies on another file system than the journal
MARK = stat.S_ISVTX  # on our folders while a change is under way: tells a killed run's from what somebody else made


@dataclass(frozen=True)
class Change:
    """A file's content before and after; None where it doesn't exist."""

    path: str
    old: bytes | None
    new: bytes | None


@dataclass(frozen=True)
class _Entry:
    """A change as plan.json has it: blob ids for contents. The n-th entry's are kept as n.old and n.new."""

    path: str
    old: str | None
    new: str | None


def carry_out(tree: Tree, changes: list[Change]) -> bool:
    """Makes all changes or none; False where all were there already.

    DriftError where a file is neither old nor new; OSError where writing fails, with everything taken back; UsageError
    where not even that worked.
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
        for number, change in enumerate(changes):
            if tree.read(change.path) != change.old:  # an editor saved it in this very moment
                raise DriftError("a file changed while the command ran", [change.path])
            _put(tree, change.path, None if change.new is None else _copy(tree, number, "new"))
        _flush_parents(tree, [change.path for change in changes])
    except BaseException as error:  # a full disk, Ctrl-C: taken back at once where that is possible
        if _take_back(tree, error) == "finished" and isinstance(error, OSError):
            return True  # only a last flush failed
        raise
    try:
        _close(tree)
    except OSError as error:
        _finish(tree, error)
    return True


def heal(tree: Tree, keep: Callable[[list[str]], object] | None = None) -> str | None:
    """Settles an interrupted run; says "rolled back" or "finished", None where there was nothing to do.

    DriftError where somebody edited a file since; with `keep`, which is given those files to put a copy aside, the run
    is taken back all the same.
    """
    folder = tree.path(JOURNAL)
    plan = read(folder / "plan.json")
    if plan is None:
        if _marked(tree.path(HOME)) or (owned(tree) and folder.is_dir()):
            tidy(tree)
        return None
    entries = _entries(tree, plan)
    found = [_blob(tree.read(entry.path)) for entry in entries]
    edited = {n: entry for n, entry in enumerate(entries) if found[n] not in (entry.old, entry.new)}
    if edited and keep is None:
        raise DriftError(
            "a run was interrupted and these files were edited since; nothing was changed. "
            f"`{command_line(tree, 'revert --force')}` keeps copies of them and takes the run back; "
            f"or put back what they held, from {folder}, and run the command again",
            [
                f"{entry.path} ({'was not there' if entry.old is None else f'held what is in {n}.old'})"
                for n, entry in edited.items()
            ],
        )
    done = all(found[n] == entry.new for n, entry in enumerate(entries))
    behind = [] if done else [n for n, entry in enumerate(entries) if found[n] != entry.old]
    lost = [entries[n].path for n in behind if not _kept(tree, n, entries[n].old)]
    if lost:
        raise _damaged(tree, "what these files held before is missing from it", lost)
    if edited and keep is not None:
        keep([entry.path for entry in edited.values()])
    for entry in entries:
        tree.path(entry.path + TEMPORARY).unlink(missing_ok=True)
    for n in reversed(behind):
        _put(tree, entries[n].path, None if entries[n].old is None else _copy(tree, n, "old"))
    _flush_parents(tree, [entry.path for entry in entries])
    _close(tree)
    return "finished" if done else "rolled back"


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
        if not os.listdir(folder):
            os.rmdir(folder)
    if _marked(home):
        os.chmod(home, stat.S_IMODE(home.stat().st_mode) & ~MARK)


def _open(tree: Tree, changes: list[Change]) -> None:
    folder = tree.path(JOURNAL)
    shutil.rmtree(folder, ignore_errors=True)
    _make_folders(tree, folder)
    for number, change in enumerate(changes):
        before = None if change.old is None else tree.path(change.path).stat()
        for side, data in (("old", change.old), ("new", change.new)):
            if data is not None:
                _write(_copy(tree, number, side), data)
                _like(_copy(tree, number, side), before, tree)
    entries = [_Entry(change.path, _blob(change.old), _blob(change.new)) for change in changes]
    _write(folder / "plan.new", json.dumps({"changes": [asdict(entry) for entry in entries]}, indent=1).encode())
    os.replace(folder / "plan.new", folder / "plan.json")
    _flush(folder)


def _copy(tree: Tree, number: int, side: str) -> Path:
    """Where the journal keeps a content of the n-th change."""
    return tree.path(JOURNAL) / f"{number}.{side}"


def _finish(tree: Tree, error: OSError) -> None:
    """A second attempt at closing a run whose files are all in place."""
    try:
        heal(tree)
    except OSError:
        raise UsageError(
            f"{tree.package} is changed as asked, but the journal could not be removed ({error}). "
            f"Nothing is lost: once that is mended, `{command_line(tree, 'status')}` removes it"
        ) from error


def _take_back(tree: Tree, error: BaseException) -> str | None:
    try:
        return heal(tree)
    except OSError as failed:
        raise UsageError(
            f"{tree.package} could not be written ({error}), nor what was written be taken back ({failed}). "
            f"Nothing is lost: once that is mended, `{command_line(tree, 'status')}` takes it back"
        ) from error


def _entries(tree: Tree, plan: bytes) -> list[_Entry]:
    """What plan.json says; DriftError where it can't be read."""
    try:
        entries = [_Entry(**raw) for raw in json.loads(plan)["changes"]]
        for entry in entries:
            if not (isinstance(entry.old, str | None) and isinstance(entry.new, str | None)):
                raise TypeError(f"{entry} is no change")
            if what := names.fault(entry.path):
                raise TypeError(f"{entry.path!r} {what}")
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


def _kept(tree: Tree, number: int, blob: str | None) -> bool:
    return blob is None or _blob(read(_copy(tree, number, "old"))) == blob


def _close(tree: Tree) -> None:
    folder = tree.path(JOURNAL)
    (folder / "plan.json").unlink()
    _flush(folder)
    tidy(tree)


def _put(tree: Tree, rel: str, copy: Path | None) -> None:
    """Replaces or makes one file by what the journal has for it, or removes it, in one step."""
    path = tree.path(rel)
    if copy is None:
        path.unlink(missing_ok=True)
        return
    _make_folders(tree, path.parent)
    try:
        os.replace(copy, path)
    except OSError as error:
        if error.errno != errno.EXDEV:  # a folder of the package may be mounted from elsewhere
            raise
        temporary = tree.path(rel + TEMPORARY)
        _write(temporary, copy.read_bytes())
        _like(temporary, copy.stat(), tree)
        os.replace(temporary, path)


def _make_folders(tree: Tree, folder: Path) -> None:
    missing = [step for step in (folder, *folder.parents) if not step.exists()]
    marked = (tree.path(HOME), tree.path(JOURNAL))
    for step in reversed(missing):
        step.mkdir(0o777 | MARK if step in marked else 0o777)
        _own(step, tree.package.stat())
        _flush(step.parent)


def _like(path: Path, before: os.stat_result | None, tree: Tree) -> None:
    """Mode and owner of the file it replaces; a new file belongs to whom the package belongs to."""
    if before is not None:
        os.chmod(path, before.st_mode & 0o7777)
    _own(path, before or tree.package.stat())


def _own(path: Path, like: os.stat_result) -> None:
    """Root patching somebody's tree leaves it theirs."""
    if os.geteuid() == 0 and (like.st_uid, like.st_gid) != (0, os.getegid()):
        os.chown(path, like.st_uid, like.st_gid)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_parents(tree: Tree, paths: list[str]) -> None:
    """What was put and removed is on the disk before the journal is closed."""
    for folder in sorted({tree.path(path).parent for path in paths}):
        if folder.is_dir():
            _flush(folder)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blob(data: bytes | None) -> str | None:
    return None if data is None else blob_id(data)
