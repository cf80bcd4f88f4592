# SPDX-License-Identifier: Apache-2.0
"""Changing files of this checkout, all of them or none.

New contents are written beside the files first; a list of them then appears by rename (from here on the change counts);
they take their names; the list is removed. Whoever finds a list next finishes the change.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from applier.errors import DriftError, UsageError

NEW = ".treeverify-new"
LIST = f".changes{NEW}"


def replace_all(root: Path, folder: Path, writes: Mapping[str, bytes | None]) -> None:
    """Gives files below `root` these contents; None removes. The list of changes lies in `folder` meanwhile.

    OSError where it fails: nothing was changed, or the next `settle` finishes.
    """
    for top in {rel.split("/")[0] for rel in writes}:
        for stale in [*(root / top).rglob(f".*{NEW}")]:
            stale.unlink()
    made: list[Path] = []
    try:
        for rel, data in writes.items():
            if data is not None:
                made.append(_beside(root / rel))
                made[-1].parent.mkdir(parents=True, exist_ok=True)
                _write(made[-1], data)
                if (root / rel).exists():
                    shutil.copymode(root / rel, made[-1])
        made.append(folder / f"{LIST}.tmp")
        _write(made[-1], json.dumps({rel: data is not None for rel, data in writes.items()}).encode())
        os.replace(made[-1], folder / LIST)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    settle(root, folder)


def make_folder(folder: Path, files: Mapping[str, bytes], check: Callable[[Path], object]) -> None:
    """A new folder, whole or not at all; `check` may refuse it before it has its name. UsageError where it exists."""
    if folder.exists():
        raise UsageError(f"{folder} exists; name another with --name, or delete it where nobody needs it")
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        for rel, data in files.items():
            path = scratch / folder.name / rel  # one deeper than where pins are looked for
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, data)
        check(scratch / folder.name)
        os.replace(scratch / folder.name, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def pending(folder: Path) -> bool:
    """Whether a change was interrupted, or is going on: the caller takes the lock to find out."""
    return (folder / LIST).exists()


def settle(root: Path, folder: Path) -> bool:
    """Finishes a change that was interrupted; whether there was one."""
    path = folder / LIST
    if not pending(folder):
        return False
    try:
        writes = {root / rel: bool(kept) for rel, kept in json.loads(path.read_bytes()).items()}
        inside = all(file.resolve().is_relative_to(root.resolve()) for file in writes)
    except (ValueError, AttributeError):
        inside = False
    if not inside:
        raise DriftError(f"{path} is damaged; see `git status`, undo what is half done, and delete it")
    for file, kept in writes.items():
        if not kept:
            file.unlink(missing_ok=True)
        elif _beside(file).exists():
            os.replace(_beside(file), file)
    path.unlink()
    return True


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{NEW}")


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
