# SPDX-License-Identifier: Apache-2.0
"""Text for the kit: the sources of the running interpreter's standard library.

A file is held out by the hash of its path, so the split is the same whatever else is in the corpus and whatever
the Python version.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 4
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib", "turtledemo"}
MAX_FILE_BYTES = 256 * 1024  # larger ones are tables, not code


@dataclass(frozen=True, order=True)
class Source:
    """One file: its path relative to the library and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(self.path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def sources(root: Path | None = None) -> list[Source]:
    """Every readable UTF-8 .py file under root (default: the standard library), ordered by path."""
    root = root or standard_library()
    found = sorted(_files(root))
    if not found:
        raise FileNotFoundError(f"no .py files under {root}: name a Python standard library with --corpus")
    return found


def _files(root: Path) -> Iterator[Source]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED.intersection(relative.parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield Source(relative.as_posix(), text)


def digest(files: list[Source]) -> str:
    """SHA-256 over every path and text, in order."""
    total = hashlib.sha256()
    for file in files:
        for part in (file.path, file.text):
            blob = part.encode()
            total.update(len(blob).to_bytes(8, "little") + blob)
    return total.hexdigest()
