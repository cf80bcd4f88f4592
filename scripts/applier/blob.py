# SPDX-License-Identifier: Apache-2.0
"""Git blob ids without git."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from applier.errors import DriftError


def blob_id(data: bytes) -> str:
    """The id git gives a file of this content (40 hex digits)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def file_blob(path: Path) -> str | None:
    """Blob id of a file, or None where there is none."""
    data = read(path)
    return None if data is None else blob_id(data)


def read(path: Path) -> bytes | None:
    """A file's bytes, or None where there is no such file, but nothing or a folder.

    DriftError for a pipe, socket or device, which may never come to an end.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise DriftError(f"{path} is no file but a pipe, socket or device; nothing was changed. Move it away")
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def folder_digest(files: dict[str, bytes]) -> str:
    """sha256 over names and contents, whatever the order of the dictionary."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{blob_id(files[name])}\n".encode())
    return digest.hexdigest()
