# SPDX-License-Identifier: Apache-2.0
"""Which paths may be written at all, told by their names alone; applier.tree looks at what is on the disk."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

LONGEST = 255  # bytes of one part, as on ext4
LONGEST_PATH = 1024  # bytes of all; Linux takes 4096 with what is in front of it


def fault(path: object) -> str | None:
    """What is wrong with a path below the package, None where it is plain: no `..`, absolute path or odd character."""
    if not isinstance(path, str) or not path:
        return "is no path"
    if not path.isprintable() or "\\" in path:
        return "holds a backslash or a character that is not printed"
    parts = path.split("/")
    if path.startswith("/") or str(PurePosixPath(path)) != path or {"..", "."} & set(parts):
        return "is not a path below the sglang package"
    if any(part.casefold() == ".git" for part in parts):
        return "is git's"
    if len(path.encode()) > LONGEST_PATH or any(len(part.encode()) > LONGEST for part in parts):
        return "is too long"
    return None


def shown(path: str) -> str:
    """A path as people may see it: whatever a terminal would obey, and line ends, are written out."""
    return path if path.isprintable() else ascii(path)


def clash(paths: Iterable[str]) -> str | None:
    """Two of the paths that can't both be there on every file system: equal but for case, or a file and its folder."""
    seen: dict[str, str] = {}
    for path in sorted(paths):
        seen.setdefault(_folded(path), path)
        if seen[_folded(path)] != path:
            return f"{seen[_folded(path)]} and {path} are one file where case does not count"
    for folded, path in seen.items():
        for folder in PurePosixPath(folded).parents:
            if (other := seen.get(str(folder))) is not None:
                return f"{other} would be a file and the folder of {path}"
    return None


def below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it, case not counted."""
    return f"{_folded(path)}/".startswith(f"{_folded(folder)}/")


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
